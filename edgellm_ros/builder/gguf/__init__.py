# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files of llama.cpp as checkpoints in Hugging Face format.

reader      a file -> keys, and the place of each tensor
blocks      types of tensors; blocks of 16 or 32 weights -> codes, scales, offsets
names       tensors' names and rows as transformers has them
config      keys -> config.json
tokenizer   keys -> tokenizer.json
checkpoint  a folder with these files, whose weights stay in the GGUF file
"""
