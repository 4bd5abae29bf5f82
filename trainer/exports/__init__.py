"""What leaves the project: an encoder as a file or ONNX, what its card says of it, and weights for other libraries."""

__all__: list[str] = []
