"""Convert text and images to ids and back, and join their ids into one vocabulary.

Names are imported on first use: hash, vocabulary and configuration need no torch, and only an `ImageTokenizer`
imports timm. Training the image tokenizer (`python -m mmqk.tokenizers.train`) needs the extra `[vq]`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmqk.tokenizers.files import tokenizers_hash
    from mmqk.tokenizers.image import ImageTokenizer
    from mmqk.tokenizers.image_config import ImageTokenizerConfig
    from mmqk.tokenizers.text import TextTokenizer
    from mmqk.tokenizers.vocabulary import JointVocabulary

__all__ = ["ImageTokenizer", "ImageTokenizerConfig", "JointVocabulary", "TextTokenizer", "tokenizers_hash"]
_MODULES = {
    "ImageTokenizer": "image",
    "ImageTokenizerConfig": "image_config",
    "JointVocabulary": "vocabulary",
    "TextTokenizer": "text",
    "tokenizers_hash": "files",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
