"""python -m models NAME -o FILE [--batch N] [--seed S]"""

from __future__ import annotations

import argparse
import sys

import onnx

from models import MODELS, build_model


def _batch(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m models", description="Write a standard network as an ONNX file.")
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("-o", "--output", help="file to write (default: NAME.onnx)")
    parser.add_argument("--batch", type=_batch, default=1, help="batch size, or a name for an open dim (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    options = parser.parse_args(argv)
    output = options.output or f"{options.name}.onnx"
    onnx.save(build_model(options.name, options.batch, options.seed), output)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
