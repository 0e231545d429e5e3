"""patch: the recurrent layers of a Hugging Face transformers model run on Holdfast's ops."""

from .patch import patch, unpatch

__all__ = ["patch", "unpatch"]
