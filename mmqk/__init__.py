"""mmqk: an open laboratory for multimodal training instability."""

__version__ = "0.1.0"
