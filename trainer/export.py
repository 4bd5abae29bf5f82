"""`python -m trainer.export RUN_DIR --out encoder.safetensors`: write the trained encoder for use in other code.

Writes one safetensors file: the weights of the trunk by the names of its library, and a header. The header holds the
encoder's config with the mean and std of its input, the run, the step and the commit. The file is no pickle, and it is
written as a whole or not at all.

The weights of a standard ResNet load into torchvision's, without its classifier, because none was trained:

    model = torchvision.models.resnet18()
    model.fc = torch.nn.Identity()
    model.load_state_dict(safetensors.torch.load_file("encoder.safetensors"))

For the small-image form ("resnet18_small") change its stem before that:

    model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = torch.nn.Identity()

If the input has one channel, `conv1` takes 1 in place of 3. If `encoder.stem_relu` is false, also replace `model.relu`,
which torchvision uses once, by the identity. ResNet-10 and WRN-34-5 are not torchvision's, and keep the names of this
package. A timm backbone loads into `timm.create_model(name, num_classes=0, **options)`. Every model takes pictures that
are normalised by mean and std. `trainer.models.load_encoder("encoder.safetensors")` does all of this.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.core.arguments import program
from data_pipeline.core.errors import run_command
from trainer.run_dir import ALLOW_CODE_HELP, open_run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("trainer.export"), description="Write the trained encoder of a run as one safetensors file."
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="The run directory.")
    add("--out", type=Path, required=True, metavar="FILE", help="The file to write, such as encoder.safetensors.")
    add("--step", type=int, help="The checkpoint to export; 0 is the untrained encoder (default: the newest).")
    add("--allow-code", action="store_true", help=ALLOW_CODE_HELP)
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    from trainer.encoder_export import export
    from trainer.own_code import import_code_of

    run_dir = open_run(arguments.run_dir)
    if arguments.allow_code:
        import_code_of([run_dir])
    export(run_dir, arguments.out, step=arguments.step)
    print(arguments.out)


if __name__ == "__main__":
    run_command(main)
