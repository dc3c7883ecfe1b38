"""What every launch says to Triton's compiler, whatever the version's defaults are."""

__all__ = ["OPTIONS"]

OPTIONS = {"enable_fp_fusion": True}
"""Products are added without rounding in between; Triton 3.9 warns that its default changes."""
