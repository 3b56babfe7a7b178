"""Class-activation maps: the methods, each with its paper and equation, and the targets they explain."""

PIXELS = ("mask", "all")
"""Over which pixels a segmentation's class score is summed: those that the class won, or all."""
