"""MNIST (LeCun et al. 1998) as pictures: 28 x 28 pixels in one channel, from the files that torchvision downloads."""

from __future__ import annotations

from typing import ClassVar, Self

from data_pipeline.core.sample import BASE, Record
from data_pipeline.core.schema import Schema
from data_pipeline.sources import SourceInputs
from data_pipeline.sources.digits import DigitSource, MnistKind, mnist_digits


class MnistOptions(Schema):
    """The options of the source mnist.

    kind: the digits of each split, as in `data_pipeline.sources.digits`. The default has the published splits of
        60,000 and 10,000 digits. `mnist` has the training digits in both splits, so training refuses its test set.
    """

    kind: MnistKind = "mnist_test_for_test"


class Mnist:
    """The digits of one split, white on black; the base label is the digit.

    Raises `UserError` if `root` lacks the files, or if they are damaged.
    """

    options_schema: ClassVar[type[Schema]] = MnistOptions

    def __init__(self, digits: DigitSource) -> None:
        self.description = digits.name
        self.num_records, self.labels = len(digits.labels), {BASE: digits.column}
        self._digits_NHW = digits.images

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        options = given.read(MnistOptions)
        return cls(mnist_digits(given.required_root(), split=given.split, kind=options.kind))

    def __getitem__(self, number: int) -> Record:
        return Record(self._digits_NHW[number][:, :, None])
