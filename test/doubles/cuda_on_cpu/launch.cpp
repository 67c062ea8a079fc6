// SPDX-License-Identifier: Apache-2.0
// A library with all kernels and one function that launches them by name. kernels.inc: the CUDA sources.
#include "kernel_table.h"

#include "kernels.inc"

#define BY_WIDTH(name) KERNEL(name##_1) KERNEL(name##_2) KERNEL(name##_4) KERNEL(name##_8) KERNEL(name##_16)

static const NamedKernel kernels[] = {
    BY_WIDTH(embed) BY_WIDTH(deepstack) BY_WIDTH(copy_cache_rows) BY_WIDTH(copy_cache_ranges) BY_WIDTH(causal_mask)
        BY_WIDTH(commit_states) BY_WIDTH(begin_accepted) BY_WIDTH(begin_level) BY_WIDTH(tree_mask)
            BY_WIDTH(move_cache_rows) BY_WIDTH(take_rows) BY_WIDTH(take_accepted) BY_WIDTH(put_rows)
                KERNEL(resize_width) KERNEL(resize_height) KERNEL(place_image) KERNEL(cut_patches) KERNEL(rope_rows)
                    KERNEL(mrope_rows) KERNEL(visible_rows) KERNEL(count_tokens) KERNEL(commit_tokens) KERNEL(open_row)
                        KERNEL(move_row) KERNEL(begin_rows) KERNEL(commit_rows) KERNEL(map_tokens) KERNEL(euler_step)
                            KERNEL(conditioned_step) KERNEL(denoising_step) KERNEL(mask_logits) KERNEL(sample)
                                KERNEL(log_probabilities) KERNEL(fill) KERNEL(add_candidates)
                                    KERNEL(add_candidates_half) KERNEL(select_tree) KERNEL(tree_rope_rows)
                                        KERNEL(sample_path) KERNEL(find_continuation) KERNEL(append_history)
                                            KERNEL(advance_states) KERNEL(advance_windows)};

// 0 when the kernel has run, 1 for an unknown name, 2 for a wrong number of arguments.
extern "C" int launch(const char* name, unsigned blocks, unsigned rows, unsigned threads, int cooperative,
                      Arguments arguments, int count) {
  const NamedKernel* kernel = find_kernel(kernels, name);
  if (!kernel) return 1;
  if (kernel->count != count) return 2;
  cuda_on_cpu::run_grid({blocks, rows, 1}, threads, cooperative, {kernel->run, arguments}, nullptr, nullptr);
  return 0;
}
