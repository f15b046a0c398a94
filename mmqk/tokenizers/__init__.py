"""Text and images to ids and back, and the joint vocabulary that places both.

Using a tokenizer needs torch, `tokenizers` and the stored files only; training the image tokenizer
(`mmqk.tokenizers.vq`, `python -m mmqk.tokenizers.train`) needs timm, Lightning and the extra `[vq]`.
"""

from mmqk.tokenizers.files import tokenizers_hash
from mmqk.tokenizers.image import ImageTokenizer, ImageTokenizerConfig
from mmqk.tokenizers.text import TextTokenizer
from mmqk.tokenizers.vocabulary import JointVocabulary

__all__ = ["ImageTokenizer", "ImageTokenizerConfig", "JointVocabulary", "TextTokenizer", "tokenizers_hash"]
