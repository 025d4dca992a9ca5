"""Send handwritten digits as codes: an encoder on one side, a decoder on the other, nothing but ids between them; bytes beside PNG.

python examples/codes_digits.py [output folder] [--steps 300] [--levels 4] [--codes 64] [--target x86]

The encoder is compiled, the decoder is an ONNX file: what two machines may run. A PNG is without loss, codes are not.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

import khtst_compile as kc
from khtst_compile.zoo import data
from khtst_compile.zoo.autoencoder import CodeAutoencoder, fit
from khtst_compile.zoo.checkpoint import CALIBRATION, PROGRAM, save
from khtst_compile.zoo.gsq import ResidualQuantizer, Schedule


def png_bytes(image: npt.NDArray[np.float32]) -> int:
    """image: (height, width) in [0, 1], of 17 shades as scikit-learn has it -> the size of its PNG, by Pillow."""
    file = io.BytesIO()
    Image.fromarray(np.rint(16 * image).astype(np.uint8)).save(file, "png", optimize=True)
    return len(file.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=Path("out/codes_digits"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--codes", type=int, default=64)
    parser.add_argument("--target", default="x86")
    args = parser.parse_args()
    out = args.output

    digits = data.digits()[0].flatten(1)
    seen, held_out = digits[torch.arange(len(digits)) % 4 != 3], digits[3::4]  # every fourth digit is sent, none of them was seen
    quantizer = ResidualQuantizer(32, args.codes, args.levels, mode="ste_ema", tau=Schedule(1.0, 0.1, args.steps))
    model = CodeAutoencoder(64, 32, quantizer, seed=0)
    fit(model, seen, args.steps, seed=0, batch=64)
    save(model.eval(), (seen[:2],), [(seen,)], out)  # as it was trained: `quantize` freezes the codebooks

    kc.quantize(out / PROGRAM, out / "q", calib=out / CALIBRATION)
    kc.split(out / "q", encoder=out / "enc", decoder=out / "dec")
    kc.lower(out / "enc", out / "enc-compiled", target=args.target)
    kc.export(out / "dec", out / "dec-onnx")

    x = held_out.numpy()
    codes = kc.encode(out / "enc-compiled", {"x": x}, output=out / "digits.codes", pack=True)
    found = kc.decode(out / "dec-onnx", out / "digits.codes")["output_0"]
    whole = kc.decode(out / "dec", codes)["output_0"]
    print(f"{len(x)} digits, {codes.count} ids, {codes.lost} without a code, file {(out / 'digits.codes').stat().st_size} bytes")
    print(
        f"bytes a digit: codes {codes.bytes(packed=True) / len(x):.2f}, as int32 {codes.bytes(packed=False) / len(x):.2f}",
        end=", ",
    )
    single = np.mean([png_bytes(i) for i in x.reshape(-1, 8, 8)])
    print(f"PNG {single:.1f}, one PNG of all {png_bytes(x.reshape(-1, 8)) / len(x):.1f}")
    error, size = float(np.sqrt(np.mean((found - x) ** 2))), float(np.std(x))
    print(
        f"root mean squared error {error:.3f}; of the mean digit {float(np.sqrt(np.mean((x - seen.numpy().mean(0)) ** 2))):.3f}",
        end="",
    )
    print(f"; standard deviation of pixels {size:.3f}; decoders differ by {float(np.abs(found - whole).max()):.1e}")
    print(f"khtst-compile inspect {out / 'q'} --codebooks")


if __name__ == "__main__":
    main()
