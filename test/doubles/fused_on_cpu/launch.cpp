// SPDX-License-Identifier: Apache-2.0
// A library with the fused kernels and one function that launches them by name. kernels.inc: the CUDA sources; KERNELS:
// KERNEL(name) of each.
#include "clusters.h"
#include "kernel_table.h"

#include "kernels.inc"

#ifndef KERNELS
#if ATTENDS_IN_BATCH
#define ATTENTION_KERNELS KERNEL(rope_append_kv) KERNEL(tree_attention) KERNEL(batch_attention)
#elif !ATTENDS_BY_ROW
#define ATTENTION_KERNELS KERNEL(rope_append_kv) KERNEL(tree_attention)
#elif ROWS > 1
#define ATTENTION_KERNELS KERNEL(attention) KERNEL(rope_append_kv) KERNEL(tree_attention)
#else
#define ATTENTION_KERNELS KERNEL(attention)
#endif
#if JOINED
#define FIRST_KERNELS KERNEL(joined_qkv)
#else
#define FIRST_KERNELS KERNEL(prep_qkv) KERNEL(qkv)
#endif
#if DRAFTS
#define OWN_KERNELS FIRST_KERNELS KERNEL(draft_head)
#else
#define OWN_KERNELS FIRST_KERNELS KERNEL(prep_lm_head) KERNEL(lm_head) KERNEL(last_state)
#endif
#if MIXER
#define MIXER_KERNELS KERNEL(prep_in_proj) KERNEL(in_proj) KERNEL(mix) KERNEL(prep_out_proj) KERNEL(out_proj)
#else
#define MIXER_KERNELS
#endif
#define X_KERNELS KERNEL(combine_splits) KERNEL(prep_gate_up) KERNEL(prep_down)
#define KERNELS OWN_KERNELS X_KERNELS ATTENTION_KERNELS MIXER_KERNELS KERNEL(o) KERNEL(gate_up) KERNEL(down)
#endif
static const NamedKernel kernels[] = {KERNELS};

// 0 when the kernel has run, 1 for an unknown name, 2 for a wrong number of arguments, 3 for too much smem.
extern "C" int launch(const char* name, unsigned blocks, unsigned rows, unsigned threads, unsigned shared,
                      unsigned cluster_size, Arguments arguments, int count) {
  const NamedKernel* kernel = find_kernel(kernels, name);
  if (!kernel) return 1;
  if (kernel->count != count) return 2;
  if (shared > fused_on_cpu::SHARED_BYTES) return 3;
  fused_on_cpu::run_grid({blocks, rows, 1}, threads, cluster_size, {kernel->run, arguments});
  return 0;
}
