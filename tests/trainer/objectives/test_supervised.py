"""Supervised training: its loss against a loop, samples without the label, and planted data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from trainer.build import Training, build_training
from trainer.objectives import ObjectiveInputs, SupervisedConfig, ViewPair, labelled_cross_entropy
from trainer.objectives.supervised import Supervised

NUM_CLASSES = 3
LABELS = torch.tensor([2, NO_LABEL, 0, NO_LABEL, NO_LABEL, NO_LABEL, 1, 0, 2, 1, 1, NO_LABEL])
CPU = torch.device("cpu")


def embeddings() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(len(LABELS), 5, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2)]


def objective() -> Supervised:
    torch.manual_seed(0)
    return Supervised(SupervisedConfig(label="digit"), embedding_size=5, num_classes=NUM_CLASSES).double()


def pair(label_B: Tensor) -> ViewPair:
    nothing = torch.empty(0)
    return ViewPair(nothing, nothing, nothing, step=0, labels={"base": torch.zeros_like(label_B), "digit": label_B})


def test_loss_and_gradients_equal_a_loop_over_the_labelled_samples() -> None:
    z_a, z_b = embeddings()
    module = objective()
    output = module(z_a, z_b, pair(LABELS))
    terms, right = [], 0
    for number, label in enumerate(LABELS.tolist()):
        if label != NO_LABEL:
            for z in (z_a[number], z_b[number]):
                logits_K = module.classifier.weight @ z + module.classifier.bias
                terms.append(logits_K.exp().sum().log() - logits_K[label])
                right += int(logits_K.argmax()) == label
    expected = torch.stack(terms).mean()
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    assert output.metrics["accuracy"].item() == pytest.approx(right / len(terms))
    wanted = (z_a, z_b, *module.parameters())
    ours, theirs = (torch.autograd.grad(loss, wanted) for loss in (output.loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_samples_without_the_label_change_nothing() -> None:
    z_a, z_b = embeddings()
    module, has_label_B = objective(), LABELS != NO_LABEL
    whole = module(z_a, z_b, pair(LABELS)).loss
    alone = module(z_a[has_label_B], z_b[has_label_B], pair(LABELS[has_label_B])).loss
    torch.testing.assert_close(whole, alone, rtol=1e-14, atol=0)
    gradient_a, _ = torch.autograd.grad(whole, (z_a, z_b))
    assert torch.equal(gradient_a.abs().sum(1) > 0, has_label_B)


def test_without_any_label_loss_and_gradients_are_zero() -> None:
    z_a, z_b = embeddings()
    module = objective()
    output = module(z_a, z_b, pair(torch.full_like(LABELS, NO_LABEL)))
    assert output.loss.item() == output.metrics["accuracy"].item() == 0
    for gradient in torch.autograd.grad(output.loss, (z_a, z_b, *module.parameters())):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_low_precision_is_raised() -> None:
    logits = torch.randn(12, NUM_CLASSES, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = labelled_cross_entropy(logits, LABELS)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, labelled_cross_entropy(logits.float(), LABELS))


@pytest.mark.parametrize(
    ("label", "num_classes", "said"),
    [
        ("base", {}, "objective.label=base is no label of the train set"),
        ("shap", {"base": 2, "shape": 9}, 'label=shap is no label of the train set; did you mean "shape"?'),
        ("digit", {"base": 2, "overlay": 9}, "label=digit is no label of the train set; valid are: base, overlay"),
        ("base", {"base": 1, "overlay": 9}, "objective.label=base has a single class"),
    ],
)
def test_a_label_that_cannot_be_learned_is_refused(label: str, num_classes: dict[str, int], said: str) -> None:
    given = ObjectiveInputs(torch.nn.Identity(), embedding_size=5, num_samples=9, seed=0, num_classes=num_classes)
    with pytest.raises(UserError, match=said.replace("?", "[?]")):
        SupervisedConfig(label=label).build(given)


def test_a_label_of_one_view_alone_is_refused() -> None:
    per_view = ["data.overlay=online_per_view", "objective.kind=supervised"]
    assert resolve_recipe("debug:image", per_view).objective == SupervisedConfig()
    with pytest.raises(UserError, match=r"objective\.label=overlay is a label of the first view only"):
        resolve_recipe("debug:image", [*per_view, "objective.label=overlay"])


def planted(number: int) -> Batch:
    """Return pictures whose base class is their colour. Nothing in them shows the other label."""
    draw = torch.Generator().manual_seed(number)
    colour_B, absent_B = (torch.randint(0, NUM_CLASSES, (32,), generator=draw) for _ in range(2))
    pictures = torch.randint(0, 100, (32, 3, 16, 16), dtype=torch.uint8, generator=draw)
    pictures[torch.arange(32), colour_B] += 120
    index_B = 32 * number + torch.arange(32)
    return Batch(number, 0, index_B, pictures, pictures, None, None, {"base": colour_B, "absent": absent_B})


@pytest.mark.slow
@pytest.mark.parametrize(("label", "lowest", "highest"), [("base", 0.98, 1.0), ("absent", 0.2, 0.47)])
def test_on_new_pictures_a_planted_label_is_read_and_an_absent_one_is_at_chance(
    label: str, lowest: float, highest: float
) -> None:
    plain = "{kind: expert_image, jitter_probability: 0, grayscale_probability: 0, area: [0.5, 1]}"
    config = resolve_recipe(
        "debug:image",
        [f"views={plain}", "objective.kind=supervised", f"objective.label={label}", "optimizer={kind: adam}"],
    )
    classes = {"base": NUM_CLASSES, "absent": NUM_CLASSES}
    training: Training = build_training(config, num_samples=2048, num_classes=classes, device=CPU)
    rates = dict.fromkeys(training.engines, 3e-3)
    for number in range(24):
        training.step(planted(number), learning_rates=rates)
    unseen = [training.step(planted(number), learning_rates=dict.fromkeys(rates, 0.0)) for number in range(24, 30)]
    accuracy = torch.stack([output.metrics["train/accuracy"] for output in unseen]).mean().item()
    assert lowest <= accuracy <= highest
