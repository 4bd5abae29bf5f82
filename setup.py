"""Install with `pip install -e .`; the extras `tested`, `test`, `lint` and `docs` are what make's commands need."""

import re
from pathlib import Path

from setuptools import find_packages, setup

DEEPSPEED = "deepspeed==0.19.8"
VERSION = re.findall('__version__ = "(.+)"', Path("trainer/__init__.py").read_text())[0]

setup(
    name="feature-dropout",
    version=VERSION,
    description="Self-supervised learning at scale: do augmentations that destroy features help to learn more of them?",
    python_requires=">=3.11",
    packages=find_packages(include=["configs*", "data_pipeline*", "launch*", "trainer*"]),
    package_data={
        "": ["py.typed"],  # the types are for users too (PEP 561)
        "data_pipeline": ["overlays/assets/*"],
        "launch": ["job.sh"],
        "trainer": [
            "analyses/play.html",
            "exports/model_card.md",
            "reports/report.css",
            "reports/templates/*",
            "reports/published/*.csv",
            "theory/*/claims.yaml",
        ],
    },
    entry_points={
        "console_scripts": [
            f"overlay-{name} = launch.console:{name}"
            for name in (
                *("train", "slurm", "status", "data"),
                *("probe", "analyze", "report", "export", "theory"),
            )
        ]
    },
    install_requires=[
        "torch>=2.9",
        "torchvision>=0.24",
        "braceexpand>=0.1.7",
        "fsspec[http]>=2024.6",
        "jinja2>=3.1",
        "markupsafe>=2.1",
        "matplotlib>=3.8",
        "networkx>=3.0",
        "numpy>=2.0",
        "pillow>=11.3",
        "pydantic>=2.8",
        "pyyaml>=6.0",
        "safetensors>=0.8",
        "scikit-learn>=1.4",
        "scipy>=1.13",
        "simplejpeg>=1.8",
        "soundfile>=0.12",
        "submitit>=1.5.2",
        "wandb>=0.31",
        "webdataset>=0.2.86",
    ],
    extras_require={
        # The versions of make's environment, for packages that change often. The tests compare with torchaudio. Its
        # newest version needs this torch.
        "tested": [
            *("torch==2.11.0", "torchaudio==2.11.0", "torchvision==0.26.0"),
            *("submitit==1.5.4", "wandb==0.31.0", "webdataset==1.0.2"),
        ],
        "parquet": ["pyarrow>=15"],
        "test": [
            DEEPSPEED,
            "hypothesis>=6.100",
            "ipykernel>=6.29",
            "librosa>=0.10.2",
            "lightly",
            "moto[server]>=5.1",
            "nbclient>=0.10",
            "datasets>=2.19",
            "onnx>=1.17",
            "onnxruntime>=1.20",
            "onnxscript>=0.5",
            "optuna>=4",
            "pillow-heif>=1.0",
            "pytest>=9",
            "pytest-xdist",
            "pytorch-lightning>=2.4",
            "s3fs>=2024.6",
            "setuptools>=70.1,<82",  # 70.1 and newer build wheels by themselves; torch excludes 82
            "tensorboard>=2.16",
            "timm>=1.0",
            "wandb-workspaces>=0.4.13",
        ],
        "benchmarks": ["lightly", "librosa>=0.10.2", "open_clip_torch", "soxr"],
        "deepspeed": [DEEPSPEED],
        "heif": ["pillow-heif>=1.0"],
        "onnx": ["onnx>=1.17", "onnxscript>=0.5"],
        "s3": ["s3fs>=2024.6"],
        "reports": ["wandb-workspaces>=0.4.13"],
        "tensorboard": ["tensorboard>=2.16"],
        "timm": ["timm>=1.0"],
        "lint": ["mypy", "ruff", "types-PyYAML", "types-setuptools"],
        "docs": ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"],
    },
)
