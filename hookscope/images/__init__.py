"""Pictures: which files are meant, what is in them, and where the model's crop lies in the original.

Besides `models` the only part that reads files. It hands over plain RGB pictures at their own size; it never
resizes, never knows a tensor or a model, never writes, and never prints.
"""

from hookscope.images.datasets import find_dataset
from hookscope.images.decoding import decode
from hookscope.images.finding import Found, ImageFailure, ImageRef, find
from hookscope.images.geometry import View

__all__ = ["Found", "ImageFailure", "ImageRef", "View", "decode", "find", "find_dataset"]
