// SPDX-License-Identifier: Apache-2.0
// Kernels by name, with their arguments as 64-bit values.
#pragma once
#include "blocks.h"

using Arguments = const uint64_t*;

template <size_t... I>
struct Indices {};

template <class Kernel, Kernel* kernel>
struct Caller;

template <class... A, void (*kernel)(A...)>
struct Caller<void(A...), kernel> {
  static constexpr int count = sizeof...(A);

  template <size_t... I>
  static void call(Arguments arguments, Indices<I...>) {
    kernel(cuda_on_cpu::same_bits<A>(arguments[I])...);
  }
  static void run(Arguments arguments) { call(arguments, Indices<__integer_pack(sizeof...(A))...>{}); }
};

struct NamedKernel {
  const char* name;
  int count;  // of arguments
  void (*run)(Arguments);
};

#define KERNEL(name) {#name, Caller<decltype(name), name>::count, Caller<decltype(name), name>::run},

// Null for an unknown name.
template <size_t N>
const NamedKernel* find_kernel(const NamedKernel (&kernels)[N], const char* name) {
  for (const NamedKernel& kernel : kernels)
    if (strcmp(kernel.name, name) == 0) return &kernel;
  return nullptr;
}
