"""Export an encoder: as a file, as ONNX, for the Hub with a model card, or as weights for torchvision and timm."""

__all__: list[str] = []
