"""Attention over the paged cache: kernels, each beside its torch twin."""
