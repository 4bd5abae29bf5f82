"""A convnet for tests: fewer batch norms than a ResNet, so fewer messages between ranks, and compiled sooner."""

from __future__ import annotations


def convnet(size: int) -> str:
    """Return the setting of an encoder for pictures of `size` x `size` pixels.

    It has three batch norms: of a convolution, of the dense layer and of the head.
    """
    return (
        f"encoder={{kind: convnet, channels: [16], dense_size: 32, image_size: [{size}, {size}], embedding_size: 16, "
        "mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25], "
        "head: {hidden_sizes: [8], batch_norm: true, bias: false, defaults: keras}}"
    )


CONVNET = convnet(16)
