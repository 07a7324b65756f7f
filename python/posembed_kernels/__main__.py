"""Prints the folders of posembed_kernels.h and of its library, for C compilers."""

from posembed_kernels import include_dir, library_path

print(include_dir(), library_path().parent)
