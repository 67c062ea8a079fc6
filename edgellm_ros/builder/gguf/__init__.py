# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files of llama.cpp as checkpoints in Hugging Face format.

reader         a file -> keys, and the place of each tensor
keys           typed access to keys
blocks         types of tensors; blocks of 16 or 32 weights -> codes, scales, offsets
names          tensors' names as transformers has them
changes        what llama.cpp changes in tensors
tensors        tensors of transformers, made of those of a file
config         keys -> configuration of a dense text model
hybrids        keys -> configuration of a hybrid
vision         a second file -> vision tower and image processor
architectures  what files of an architecture have of all this
tokenizer      keys -> tokenizer.json
checkpoint     a folder with these files, whose weights stay in the GGUF file
"""
