// SPDX-License-Identifier: Apache-2.0
// Kernels by name, with their arguments as 64-bit values.
#pragma once
#include "cuda_on_cpu.h"

#include <map>
#include <string>

using Arguments = const uint64_t*;
using Prepared = std::function<void()>;

template <class... A, size_t... I>
Prepared prepare(void (*kernel)(A...), Arguments arguments, std::index_sequence<I...>) {
  return [=] { kernel(cuda_on_cpu::same_bits<A>(arguments[I])...); };
}

// Nothing if the number of arguments is not the kernel's.
template <class... A>
Prepared prepare(void (*kernel)(A...), Arguments arguments, int count) {
  return count == sizeof...(A) ? prepare(kernel, arguments, std::index_sequence_for<A...>{}) : Prepared{};
}

using KernelTable = std::map<std::string, std::function<Prepared(Arguments, int)>>;

#define KERNEL(name) {#name, [](Arguments arguments, int count) { return prepare(name, arguments, count); }},
