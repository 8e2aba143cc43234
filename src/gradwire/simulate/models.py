"""Tensor sizes of the models that HiPress and THC measure: image models, UGATIT, language models, LSTM, Transformer.

Every model is derived layer by layer from its published architecture. For HiPress's models, the number of tensors,
total size and largest size match the paper's table; for those of THC, the number of parameters is that of the public
implementation (tests compare them). A tensor also has the multiply-adds of its layer for one sample, from which
`ModelShape.backward` estimates when its gradient is ready.

Source: HiPress (SOSP 2021), table 6, whose MB are 2^20 bytes. Variants that match it: ResNet50 with pre-activation
(version 2), Bert with both pre-training heads, the LSTM of PyTorch's word language model (1,500 wide, tied, a
vocabulary of 33,278), TensorFlow's Transformer base (vocabulary of 33,708, no biases in attention), UGATIT at 256 x
256. THC (NSDI 2024), section 8.1 and appendix D: language models have the head of a classifier of two classes, as for
SST-2, and samples of 128 tokens. Differences: the table has one more gradient for each Bert, perhaps because it counts
the tied decoder by name; the larger ResNets are pre-activation, too.
"""

# Shapes: C = channels, L = tokens of a sample.

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from gradwire.core.errors import UnknownNameError


@dataclass(frozen=True)
class ModelTensor:
    """One parameter.

    Attributes:
        name: Name in a state dict.
        shape: Shape of the parameter and its gradient.
        work: Multiply-adds of the forward pass for one sample.
    """

    name: str
    shape: tuple[int, ...]
    work: float = 0.0

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Published:
    """Figures of a model in HiPress's table 6, in MB of 2^20 bytes with four bytes per element."""

    total_mb: float
    largest_mb: float
    num_gradients: int


@dataclass(frozen=True)
class ModelShape:
    """A model as its synchronization sees it.

    Attributes:
        name: Name in `MODELS`.
        tensors: Parameters in the order of the forward pass.
        published: Figures of HiPress's paper, to compare with; None for other models.
    """

    name: str
    tensors: tuple[ModelTensor, ...]
    published: Published | None = None

    @property
    def num_elements(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    def backward(self) -> list[tuple[ModelTensor, float]]:
        """Tensors in the order of the backward pass, each with the share of it after which its gradient is ready.

        A layer's share of the time is its share of the multiply-adds, which is right if all layers keep the device
        equally busy. A measured timeline is better.
        """
        order = self.tensors[::-1]
        total = sum(tensor.work for tensor in order)
        done = itertools.accumulate(tensor.work for tensor in order)
        return [(tensor, share / total if total else 1.0) for tensor, share in zip(order, done)]


Tensors = Iterator[ModelTensor]


def get(name: str) -> ModelShape:
    """Return a model of `MODELS`.

    Raises:
        UnknownNameError: There is no such model.
    """
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    tensors, published = MODELS[name]
    return ModelShape(name, tuple(tensors()), published)


# -- layers ------------------------------------------------------------------------------------------------------


def _linear(name: str, inputs: int, outputs: int, positions: int = 1, bias: bool = True) -> Tensors:
    yield ModelTensor(f"{name}.weight", (outputs, inputs), inputs * outputs * positions)
    if bias:
        yield ModelTensor(f"{name}.bias", (outputs,), outputs * positions)


def _conv(name: str, inputs: int, outputs: int, kernel: int, side: int, bias: bool = True) -> Tensors:
    """A square convolution whose output is `side` × `side`."""
    shape = (outputs, inputs, kernel, kernel)
    yield ModelTensor(f"{name}.weight", shape, prod(shape) * side * side)
    if bias:
        yield ModelTensor(f"{name}.bias", (outputs,), outputs * side * side)


def _norm(name: str, channels: int, positions: int = 1) -> Tensors:
    for kind in ("weight", "bias"):
        yield ModelTensor(f"{name}.{kind}", (channels,), channels * positions)


# -- images ------------------------------------------------------------------------------------------------------


def _vgg(convolutions: int) -> Tensors:
    """VGG with that many convolutions in each of the last three blocks."""
    inputs, side = 3, 224
    blocks = ((64, 2), (128, 2), (256, convolutions), (512, convolutions), (512, convolutions))
    for block, (outputs, count) in enumerate(blocks):
        for index in range(count):
            yield from _conv(f"conv{block + 1}_{index + 1}", inputs, outputs, 3, side)
            inputs = outputs
        side //= 2
    yield from _linear("fc6", 512 * 7 * 7, 4096)
    yield from _linear("fc7", 4096, 4096)
    yield from _linear("fc8", 4096, 1000)


def _resnet(third: int, second: int = 4) -> Tensors:
    """ResNet with that many units in the third and second of its four stages."""
    yield from _conv("conv0", 3, 64, 7, 112, bias=False)
    yield from _norm("bn0", 64, 112 * 112)
    inputs, side = 64, 56
    for stage, (middle, count) in enumerate(((64, 3), (128, second), (256, third), (512, 3)), start=1):
        for unit in range(1, count + 1):
            name, positions = f"stage{stage}.unit{unit}", side * side
            yield from _norm(f"{name}.bn1", inputs, positions)
            yield from _conv(f"{name}.conv1", inputs, middle, 1, side, bias=False)
            yield from _norm(f"{name}.bn2", middle, positions)
            yield from _conv(f"{name}.conv2", middle, middle, 3, side, bias=False)
            yield from _norm(f"{name}.bn3", middle, positions)
            yield from _conv(f"{name}.conv3", middle, 4 * middle, 1, side, bias=False)
            if unit == 1:
                yield from _conv(f"{name}.shortcut", inputs, 4 * middle, 1, side, bias=False)
            inputs = 4 * middle
        side //= 2
    yield from _norm("bn1", 2048, 49)
    yield from _linear("fc", 2048, 1000)


def _generator(name: str, light: bool) -> Tensors:
    """UGATIT's generator: downsampling, class activation attention, AdaLIN blocks, upsampling."""
    sides = ((3, 64, 7, 256), (64, 128, 3, 128), (128, 256, 3, 64))
    for index, (inputs, outputs, kernel, side) in enumerate(sides):
        yield from _conv(f"{name}.down{index}", inputs, outputs, kernel, side, bias=False)
    for index in range(8):
        yield from _conv(f"{name}.down_block{index // 2}.conv{index % 2}", 256, 256, 3, 64, bias=False)
    yield from _linear(f"{name}.gap_fc", 256, 1, bias=False)
    yield from _linear(f"{name}.gmp_fc", 256, 1, bias=False)
    yield from _conv(f"{name}.conv1x1", 512, 256, 1, 64)
    yield from _linear(f"{name}.fc0", 256 if light else 64 * 64 * 256, 256, bias=False)
    yield from _linear(f"{name}.fc1", 256, 256, bias=False)
    yield from _linear(f"{name}.gamma", 256, 256, bias=False)
    yield from _linear(f"{name}.beta", 256, 256, bias=False)
    for index in range(8):
        block = f"{name}.up_block{index // 2}"
        yield from _conv(f"{block}.conv{index % 2}", 256, 256, 3, 64, bias=False)
        yield ModelTensor(f"{block}.norm{index % 2}.rho", (256,), 256 * 64 * 64)
    for index, (inputs, outputs, side) in enumerate(((256, 128, 128), (128, 64, 256))):
        yield from _conv(f"{name}.up{index}", inputs, outputs, 3, side, bias=False)
        yield ModelTensor(f"{name}.up{index}.norm.rho", (outputs,), outputs * side * side)
        yield from _norm(f"{name}.up{index}.norm", outputs, side * side)
    yield from _conv(f"{name}.out", 64, 3, 7, 256, bias=False)


def _discriminator(name: str, num_halvings: int) -> Tensors:
    inputs, outputs, side = 3, 64, 256
    for index in range(num_halvings + 1):
        side = side // 2 if index < num_halvings else side - 1
        yield from _conv(f"{name}.conv{index}", inputs, outputs, 4, side)
        inputs, outputs = outputs, 2 * outputs
    yield from _linear(f"{name}.gap_fc", inputs, 1, bias=False)
    yield from _linear(f"{name}.gmp_fc", inputs, 1, bias=False)
    yield from _conv(f"{name}.conv1x1", 2 * inputs, inputs, 1, side)
    yield from _conv(f"{name}.out", inputs, 1, 4, side - 1, bias=False)


def _ugatit(light: bool = False) -> Tensors:
    for direction in ("A2B", "B2A"):
        yield from _generator(f"gen{direction}", light)
    for side in ("A", "B"):
        yield from _discriminator(f"disG{side}", 5)
    for side in ("A", "B"):
        yield from _discriminator(f"disL{side}", 3)


def _ugatit_light() -> Tensors:
    return _ugatit(light=True)


# -- text --------------------------------------------------------------------------------------------------------


def _layers(stack: str, width: int, num_layers: int, length: int, attentions: tuple[str, ...] = ("",)) -> Tensors:
    """Layers of Bert, RoBERTa and Bart."""
    for layer in range(num_layers):
        name = f"{stack}layer{layer}"
        for attention in attentions:
            for part in ("query", "key", "value", "output"):
                yield from _linear(f"{name}.{attention}attention.{part}", width, width, length)
            yield from _norm(f"{name}.{attention}attention.norm", width, length)
        yield from _linear(f"{name}.intermediate", width, 4 * width, length)
        yield from _linear(f"{name}.output", 4 * width, width, length)
        yield from _norm(f"{name}.norm", width, length)


def _bert(width: int, num_layers: int, length: int = 128) -> Tensors:
    """Bert for pre-training, whose decoder shares the matrix of the vocabulary."""
    vocabulary = 30_522
    for name, rows in (("word", vocabulary), ("position", 512), ("token_type", 2)):
        yield ModelTensor(f"embeddings.{name}.weight", (rows, width))
    yield from _norm("embeddings.norm", width, length)
    yield from _layers("", width, num_layers, length)
    yield from _linear("pooler", width, width)
    yield from _linear("predictions.transform", width, width, length)
    yield from _norm("predictions.norm", width, length)
    yield ModelTensor("predictions.bias", (vocabulary,), vocabulary * (width + 1) * length)  # with the tied matrix
    yield from _linear("seq_relationship", width, 2)


def _classifier(width: int) -> Tensors:
    """The head of RoBERTa and Bart for two classes."""
    yield from _linear("classifier.dense", width, width)
    yield from _linear("classifier.out", width, 2)


def _roberta(width: int, num_layers: int, length: int = 128) -> Tensors:
    for name, rows in (("word", 50_265), ("position", 514), ("token_type", 1)):
        yield ModelTensor(f"embeddings.{name}.weight", (rows, width))
    yield from _norm("embeddings.norm", width, length)
    yield from _layers("", width, num_layers, length)
    yield from _classifier(width)


def _bart_large(length: int = 128) -> Tensors:
    width = 1024
    yield ModelTensor("embedding.weight", (50_265, width))
    for stack, attentions in (("encoder", ("",)), ("decoder", ("", "cross_"))):
        yield ModelTensor(f"{stack}.position.weight", (1026, width))
        yield from _norm(f"{stack}.embedding_norm", width, length)
        yield from _layers(f"{stack}.", width, 12, length, attentions)
    yield from _classifier(width)


def _gpt2(length: int = 128) -> Tensors:
    width = 768
    yield ModelTensor("embedding.weight", (50_257, width))
    yield ModelTensor("position.weight", (1024, width))
    for layer in range(12):
        name = f"layer{layer}"
        yield from _norm(f"{name}.norm1", width, length)
        yield from _linear(f"{name}.attention.in", width, 3 * width, length)
        yield from _linear(f"{name}.attention.out", width, width, length)
        yield from _norm(f"{name}.norm2", width, length)
        yield from _linear(f"{name}.feed_forward.in", width, 4 * width, length)
        yield from _linear(f"{name}.feed_forward.out", 4 * width, width, length)
    yield from _norm("norm", width, length)
    yield from _linear("score", width, 2, bias=False)


def _lstm() -> Tensors:
    vocabulary, width, length = 33_278, 1500, 35
    yield ModelTensor("encoder.weight", (vocabulary, width))
    for layer in range(2):
        for kind in ("ih", "hh"):
            yield ModelTensor(f"rnn.weight_{kind}_l{layer}", (4 * width, width), 4 * width * width * length)
        for kind in ("ih", "hh"):
            yield ModelTensor(f"rnn.bias_{kind}_l{layer}", (4 * width,), 4 * width * length)
    yield ModelTensor("decoder.bias", (vocabulary,), vocabulary * (width + 1) * length)  # with the tied matrix


def _attention(name: str, width: int, length: int) -> Tensors:
    yield from _norm(f"{name}.norm", width, length)
    for part in ("query", "key", "value", "output"):
        yield from _linear(f"{name}.{part}", width, width, length, bias=False)


def _transformer() -> Tensors:
    vocabulary, width, length = 33_708, 512, 32
    yield ModelTensor("embedding.weight", (vocabulary, width))
    for stack, attentions in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
        for layer in range(6):
            name = f"{stack}.layer{layer}"
            for attention in attentions:
                yield from _attention(f"{name}.{attention}", width, length)
            yield from _norm(f"{name}.feed_forward.norm", width, length)
            yield from _linear(f"{name}.feed_forward.inner", width, 4 * width, length)
            yield from _linear(f"{name}.feed_forward.outer", 4 * width, width, length)
        logits = vocabulary * width * length if stack == "decoder" else 0.0  # the tied matrix follows this norm
        yield ModelTensor(f"{stack}.norm.weight", (width,), logits)
        yield ModelTensor(f"{stack}.norm.bias", (width,))


MODELS: dict[str, tuple[Callable[[], Tensors], Published | None]] = {
    "vgg19": (lambda: _vgg(4), Published(548.05, 392, 38)),
    "resnet50": (lambda: _resnet(6), Published(97.46, 9, 155)),
    "ugatit": (_ugatit, Published(2558.75, 1024, 148)),
    "ugatit-light": (_ugatit_light, Published(511.25, 128, 148)),
    "bert-base": (lambda: _bert(768, 12), Published(420.02, 89.42, 207)),
    "bert-large": (lambda: _bert(1024, 24), Published(1282.60, 119.23, 399)),
    "lstm": (_lstm, Published(327.97, 190.42, 10)),
    "transformer": (_transformer, Published(234.08, 65.84, 185)),
    "vgg16": (lambda: _vgg(3), None),
    "resnet101": (lambda: _resnet(23), None),
    "resnet152": (lambda: _resnet(36, 8), None),
    "roberta-base": (lambda: _roberta(768, 12), None),
    "roberta-large": (lambda: _roberta(1024, 24), None),
    "bart-large": (_bart_large, None),
    "gpt2": (_gpt2, None),
}
"""Builders, and figures of HiPress's table 6, by name."""
