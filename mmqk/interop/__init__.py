"""Convert weights and configuration to and from Hugging Face transformers, which is imported only when needed."""

from .read import from_transformers
from .write import to_transformers

__all__ = ["from_transformers", "to_transformers"]
