"""Elementary functions as straight-line code: the same for a scalar and for vectors, with no call to a library.

float32: exp, log, tanh, erf and sigmoid have code of their own; the rest is computed as double and rounded, so that its
error stays below 1 ulp. double: every function, to about 1e-14. Error bounds (tests/backend/test_vector_math.py):

    float32   exp 2 ulp, log 2 ulp, sigmoid 4 ulp, tanh 6 ulp, erf 6 ulp, others 1 ulp (sin, cos, tan: |x| <= 1e9)
    double    relative 1e-13 (sin, cos, tan: absolute 1e-13 for |x| <= 1e5)

NaN in gives NaN out, infinities give the limits. exp gives 0 below about 1.4 times the smallest normal number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import factorial, inf, log, nan, pi, sqrt

from mcompile.backend.cpu.builder import Builder, Value
from mcompile.ir.expr import UnaryOp

Function = Callable[[Builder, Value], Value]


@dataclass(frozen=True)
class _Format:
    """What the bit tricks need to know of a float format."""

    mantissa: int  # stored bits
    bias: int
    magic: float  # 1.5 * 2^mantissa: adding it rounds to an integer that stands in the low bits
    exp_limit: float  # exp overflows above
    exp_floor: float  # exp gives 0 below
    ln2_high: float  # few bits, so that its product with an exponent is exact
    ln2_low: float
    exp_tail: tuple[float, ...]  # exp(r) = 1 + r + r^2 * tail(r) for |r| <= ln(2) / 2
    smallest_normal: float


_FLOAT = _Format(
    mantissa=23,
    bias=127,
    magic=1.5 * 2**23,
    exp_limit=88.8,
    exp_floor=-86.98,
    ln2_high=0.693359375,
    ln2_low=-2.12194440e-4,
    exp_tail=(
        0.001381446678230037,
        0.008368780425254074,
        0.041668394216537015,
        0.16666520107667648,
        0.4999999341247404,
    ),
    smallest_normal=2.0**-126,
)
_DOUBLE = _Format(
    mantissa=52,
    bias=1023,
    magic=1.5 * 2**52,
    exp_limit=709.9,
    exp_floor=-708.0,
    ln2_high=6.93147180369123816490e-01,
    ln2_low=1.90821492927058770002e-10,
    exp_tail=tuple(1 / factorial(k) for k in range(14, 1, -1)),
    smallest_normal=2.0**-1022,
)


def _format(x: Value) -> _Format:
    return _FLOAT if x.element == "float" else _DOUBLE


def _exp_reduced(b: Builder, x: Value) -> tuple[Value, Value, Value]:
    """(exp(r) - 1 - r, r, bits that hold n) with x = n * ln(2) + r; x is at most the format's `exp_limit`."""
    form = _format(x)
    shifted = b.fma(x, 1 / log(2), form.magic)
    count = b.sub(shifted, form.magic)
    rest = b.fma(count, -form.ln2_high, x)
    rest = b.fma(count, -form.ln2_low, rest)
    tail = b.mul(b.polynomial(rest, form.exp_tail), b.mul(rest, rest))
    return tail, rest, b.bits(shifted)


def _power_of_two(b: Builder, count_bits: Value, less: int, form: _Format) -> Value:
    """2^(n - less) from the bits of n + magic."""
    exponent = b.binary("shl", count_bits, form.mantissa)
    return b.from_bits(b.binary("add", exponent, (form.bias - less) << form.mantissa))


def exp(b: Builder, x: Value) -> Value:
    form = _format(x)
    tail, rest, bits = _exp_reduced(b, b.least(form.exp_limit, x))
    result = b.add(b.add(tail, rest), 1.0)
    doubled = b.add(result, result)  # so that 2^n itself, n = bias + 1, need not be a number
    scaled = b.mul(doubled, _power_of_two(b, bits, 1, form))
    return b.select(b.compare("fcmp olt", x, form.exp_floor), 0.0, scaled)


def expm1(b: Builder, x: Value) -> Value:
    """exp(x) - 1, precise near 0; for x >= exp_floor."""
    form = _format(x)
    tail, rest, bits = _exp_reduced(b, b.least(form.exp_limit, x))
    half = _power_of_two(b, bits, 1, form)
    grown = b.add(tail, rest)
    return b.fma(b.add(grown, grown), half, b.sub(b.add(half, half), 1.0))


_LOG_TAIL = (
    0.06746635633644668,
    -0.1167565049233455,
    0.1188816378977898,
    -0.12405589232861094,
    0.1421955218286558,
    -0.16667995830707677,
    0.20002118667740695,
    -0.25000009599924455,
    0.33333312603909754,
)
_LOG_SERIES = (  # fdlibm's e_log.c: log((1 + s) / (1 - s)) = 2s + s * R(s^2)
    1.479819860511658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)


def log_(b: Builder, x: Value) -> Value:
    """Natural logarithm; subnormal numbers are scaled up first."""
    form = _format(x)
    small = b.compare("fcmp olt", x, form.smallest_normal)
    scaled = b.select(small, b.mul(x, 2.0**form.mantissa), x)
    root_bits = {23: 0x3F3504F3, 52: 0x3FE6A09E667F3BCD}[form.mantissa]  # of sqrt(1/2)
    bits = b.binary("sub", b.bits(scaled), root_bits)
    exponent = b.convert("sitofp", b.binary("ashr", bits, form.mantissa), x.element)
    exponent = b.add(exponent, b.select(small, -float(form.mantissa), b.like(0.0, x)))
    mantissa_bits = b.binary("and", bits, (1 << form.mantissa) - 1)
    f = b.sub(b.from_bits(b.binary("add", mantissa_bits, root_bits)), 1.0)
    result = _log_float(b, f, exponent) if x.element == "float" else _log_double(b, f, exponent)
    result = b.select(b.compare("fcmp oeq", x, inf), x, result)
    result = b.select(b.compare("fcmp oeq", x, 0.0), -inf, result)
    return b.select(b.compare("fcmp ult", x, 0.0), nan, result)


def _log_float(b: Builder, f: Value, exponent: Value) -> Value:
    """log(1 + f) + exponent * ln(2)"""
    square = b.mul(f, f)
    tail = b.mul(b.mul(b.polynomial(f, _LOG_TAIL), f), square)
    tail = b.fma(exponent, _FLOAT.ln2_low, tail)
    tail = b.fma(square, -0.5, tail)
    return b.fma(exponent, _FLOAT.ln2_high, b.add(f, tail))


def _log_double(b: Builder, f: Value, exponent: Value) -> Value:
    s = b.div(f, b.add(f, 2.0))
    square = b.mul(s, s)
    series = b.mul(b.polynomial(square, _LOG_SERIES), square)
    half = b.mul(b.mul(f, f), 0.5)
    low = b.fma(s, b.add(half, series), b.mul(exponent, _DOUBLE.ln2_low))
    return b.fma(exponent, _DOUBLE.ln2_high, b.sub(f, b.sub(half, low)))


def log1p(b: Builder, x: Value) -> Value:
    """log(1 + x): the rounding of 1 + x is put right to first order."""
    u = b.add(x, 1.0)
    lost = b.sub(x, b.sub(u, 1.0))
    result = b.add(log_(b, u), b.div(lost, u))
    return b.select(b.compare("fcmp oeq", u, inf), u, result)


_TANH_NUMERATOR = (
    1.335466245457055e-08,
    2.0609082629063973e-05,
    0.0034955881169069602,
    0.13381025614043013,
    0.9999999794493069,
)
_TANH_DENOMINATOR = (7.776558599944491e-07, 0.0003285634825304709, 0.02587698211284073, 0.46714341205322113, 1.0)


def tanh(b: Builder, x: Value) -> Value:
    if x.element == "double":
        grown = expm1(b, b.mul(b.least(22.0, _abs(b, x)), 2.0))
        return _with_sign(b, b.div(grown, b.add(grown, 2.0)), x)
    x = b.greatest(-9.0, b.least(9.0, x))
    square = b.mul(x, x)
    numerator = b.mul(x, b.polynomial(square, _TANH_NUMERATOR))
    return b.div(numerator, b.polynomial(square, _TANH_DENOMINATOR))


_ERF_NUMERATOR = (
    2.0500796846388586e-06,
    0.0002848840019471112,
    0.003765668985238591,
    0.052748886073633525,
    0.19040766116146554,
    1.128379146131967,
)
_ERF_DENOMINATOR = (
    3.8091702813782315e-05,
    0.001162548285680711,
    0.014969321468840321,
    0.11410960971574333,
    0.5020771368781539,
    1.0,
)


def erf(b: Builder, x: Value) -> Value:
    if x.element == "double":
        return _erf_double(b, x)
    x = b.greatest(-3.92, b.least(3.92, x))
    square = b.mul(x, x)
    numerator = b.mul(x, b.polynomial(square, _ERF_NUMERATOR))
    return b.div(numerator, b.polynomial(square, _ERF_DENOMINATOR))


_ERF_SERIES = tuple((-1) ** k * 2 / sqrt(pi) / (factorial(k) * (2 * k + 1)) for k in range(13, -1, -1))
_ERFC_SCALED = (  # exp(z^2) * erfc(z) * (z + 2), z = 2 (1 + u) / (1 - u), u = 0.55 v - 0.05, |v| <= 1
    1.0845539352282875e-12,
    3.15840845011668e-10,
    -3.3845498068162315e-10,
    -6.216994893451493e-09,
    -9.537967126936187e-09,
    6.15558206323151e-08,
    3.1119173090996204e-07,
    -1.5040777296940372e-07,
    -5.552196565422177e-06,
    -8.694066222064313e-06,
    9.237239143112387e-05,
    0.00027744561610306784,
    -0.0021056675284202298,
    -0.005321673670356482,
    0.08609390890488268,
    -0.39345364216541884,
    1.0566438385555774,
)


def _erf_double(b: Builder, x: Value) -> Value:
    """A series up to 1/2, above it 1 - erfc; erfc(z) = exp(-z^2) * polynomial / (z + 2)."""
    series = b.mul(x, b.polynomial(b.mul(x, x), _ERF_SERIES))
    z = b.least(6.0, b.greatest(0.5, _abs(b, x)))
    u = b.div(b.sub(z, 2.0), b.add(z, 2.0))
    v = b.mul(b.add(u, 0.05), 1 / 0.55)
    scaled = b.div(b.polynomial(v, _ERFC_SCALED), b.add(z, 2.0))
    far = b.sub(1.0, b.mul(exp(b, b.neg(b.mul(z, z))), scaled))
    return b.select(b.compare("fcmp olt", _abs(b, x), 0.5), series, _with_sign(b, far, x))


def sigmoid(b: Builder, x: Value) -> Value:
    return b.div(1.0, b.add(exp(b, b.neg(x)), 1.0))


# -- in double only; float32 comes here by `in_double` -------------------------------------------------------------

_SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)  # 33 bits, 33 bits, rest


def _sin_cos(b: Builder, x: Value) -> tuple[Value, Value, Value]:
    """(sin(r), cos(r), bits whose lowest hold n) with x = n * pi / 2 + r."""
    count = b.intrinsic("roundeven", b.mul(x, 2 / pi))
    rest = x
    for part in _HALF_PI:
        rest = b.fma(count, -part, rest)
    square = b.mul(rest, rest)
    sine = b.fma(b.mul(b.polynomial(square, _SIN), square), rest, rest)
    cosine = b.fma(b.mul(b.polynomial(square, _COS), square), square, b.fma(square, -0.5, 1.0))
    return sine, cosine, b.bits(b.add(count, _DOUBLE.magic))


def _odd_quadrant(b: Builder, quadrant: Value) -> Value:
    return b.compare("icmp ne", b.binary("and", quadrant, 1), 0)


def _negate_if(b: Builder, x: Value, quadrant: Value) -> Value:
    """-x where bit 1 of `quadrant` is set."""
    sign = b.binary("shl", b.binary("and", quadrant, 2), 62)
    return b.from_bits(b.binary("xor", b.bits(x), sign))


def sin(b: Builder, x: Value) -> Value:
    sine, cosine, quadrant = _sin_cos(b, x)
    return _negate_if(b, b.select(_odd_quadrant(b, quadrant), cosine, sine), quadrant)


def cos(b: Builder, x: Value) -> Value:
    sine, cosine, quadrant = _sin_cos(b, x)
    return _negate_if(b, b.select(_odd_quadrant(b, quadrant), sine, cosine), b.binary("add", quadrant, 1))


def tan(b: Builder, x: Value) -> Value:
    sine, cosine, quadrant = _sin_cos(b, x)
    odd = _odd_quadrant(b, quadrant)
    return b.div(b.select(odd, b.neg(cosine), sine), b.select(odd, sine, cosine))


_ATAN_NUMERATOR = (  # Cephes' atan.c: atan(x) = x + x * z * P(z) / Q(z), z = x^2, |x| <= 0.66
    -8.750608600031904122785e-1,
    -1.615753718733365076637e1,
    -7.500855792314704667340e1,
    -1.228866684490136173410e2,
    -6.485021904942025371773e1,
)
_ATAN_DENOMINATOR = (
    1.0,
    2.485846490142306297962e1,
    1.650270098316988542046e2,
    4.328810604912902668951e2,
    4.853903996359136964868e2,
    1.945506571482613964425e2,
)


def atan(b: Builder, x: Value) -> Value:
    a = _abs(b, x)
    large = b.compare("fcmp ogt", a, 1 + sqrt(2))
    middle = b.compare("fcmp ogt", a, 0.66)
    top = b.select(large, -1.0, b.select(middle, b.sub(a, 1.0), a))
    bottom = b.select(large, a, b.select(middle, b.add(a, 1.0), 1.0))
    start = b.select(large, pi / 2, b.select(middle, pi / 4, b.like(0.0, x)))
    y = b.div(top, bottom)
    z = b.mul(y, y)
    ratio = b.div(b.mul(z, b.polynomial(z, _ATAN_NUMERATOR)), b.polynomial(z, _ATAN_DENOMINATOR))
    return _with_sign(b, b.add(start, b.fma(y, ratio, y)), x)


def asin(b: Builder, x: Value) -> Value:
    root = b.intrinsic("sqrt", b.mul(b.sub(1.0, x), b.add(x, 1.0)))
    return b.mul(atan(b, b.div(x, b.add(root, 1.0))), 2.0)


def acos(b: Builder, x: Value) -> Value:
    ratio = b.div(b.sub(1.0, x), b.add(x, 1.0))
    return b.mul(atan(b, b.intrinsic("sqrt", ratio)), 2.0)


def sinh(b: Builder, x: Value) -> Value:
    """(e + e / (e + 1)) / 2 with e = exp(|x|) - 1; near overflow exp(|x| - ln 2)."""
    a = _abs(b, x)
    grown = expm1(b, b.least(700.0, a))
    near = b.mul(b.add(grown, b.div(grown, b.add(grown, 1.0))), 0.5)
    far = exp(b, b.sub(a, log(2)))
    return _with_sign(b, b.select(b.compare("fcmp ogt", a, 30.0), far, near), x)


def cosh(b: Builder, x: Value) -> Value:
    half = exp(b, b.sub(_abs(b, x), log(2)))
    return b.add(half, b.div(0.25, half))


def asinh(b: Builder, x: Value) -> Value:
    """log1p(a + a^2 / (1 + sqrt(a^2 + 1))); log(a) + ln 2 where a^2 + 1 is a^2."""
    a = _abs(b, x)
    near_a = b.least(1e9, a)
    square = b.mul(near_a, near_a)
    root = b.intrinsic("sqrt", b.add(square, 1.0))
    near = log1p(b, b.add(near_a, b.div(square, b.add(root, 1.0))))
    far = b.add(log_(b, a), log(2))
    return _with_sign(b, b.select(b.compare("fcmp ogt", a, 1e8), far, near), x)


def acosh(b: Builder, x: Value) -> Value:
    """log1p(t + sqrt(2t + t^2)) with t = x - 1."""
    t = b.sub(b.least(1e9, x), 1.0)
    near = log1p(b, b.add(t, b.intrinsic("sqrt", b.fma(t, t, b.add(t, t)))))
    far = b.add(log_(b, x), log(2))
    result = b.select(b.compare("fcmp ogt", x, 1e8), far, near)
    return b.select(b.compare("fcmp olt", x, 1.0), nan, result)


def atanh(b: Builder, x: Value) -> Value:
    a = _abs(b, x)
    ratio = b.div(b.add(a, a), b.sub(1.0, a))
    return _with_sign(b, b.mul(log1p(b, ratio), 0.5), x)


def power(b: Builder, x: Value, y: Value) -> Value:
    """x^y as C's pow, in double: |x|^y, negative for odd integers y, NaN for x < 0 and y not an integer.

    The relative error is about |y * log(x)| * 2^-52; integers to the power of integers are exact below 2^46.
    """
    a = _abs(b, x)
    result = exp(b, b.mul(y, log_(b, a)))
    whole = b.intrinsic("trunc", y)
    integers = b.binary("and", b.compare("fcmp oeq", whole, y), b.compare("fcmp oge", y, 0.0))
    integers = b.binary("and", integers, b.compare("fcmp oeq", b.intrinsic("trunc", x), x))
    result = b.select(integers, b.intrinsic("roundeven", result), result)
    half = b.mul(y, 0.5)
    odd = b.binary("and", b.compare("fcmp oeq", whole, y), b.compare("fcmp one", b.intrinsic("trunc", half), half))
    negative = b.compare("icmp slt", b.bits(x), 0)
    result = b.select(b.binary("and", odd, negative), b.neg(result), result)
    no_root = b.binary("and", b.compare("fcmp olt", x, 0.0), b.compare("fcmp one", whole, y))
    no_root = b.binary("and", no_root, b.compare("fcmp one", a, inf))
    result = b.select(no_root, nan, result)
    minus_one = b.binary("and", b.compare("fcmp oeq", a, 1.0), b.compare("fcmp oeq", _abs(b, y), inf))
    one = b.binary("or", b.compare("fcmp oeq", y, 0.0), b.compare("fcmp oeq", x, 1.0))
    return b.select(b.binary("or", one, minus_one), 1.0, result)


def remainder(b: Builder, x: Value, y: Value) -> Value:
    """C's fmod, exact: what a quotient's product leaves is a number again, however the quotient was rounded."""
    x, y = b.unify(x, y)
    a, divisor = _abs(b, x), _abs(b, y)

    def step(state: Sequence[Value]) -> tuple[Value, list[Value]]:
        (rest,) = state
        quotient = b.intrinsic("trunc", b.div(rest, divisor))
        rest = b.fma(b.neg(quotient), divisor, rest)
        return b.any_lane(b.compare("fcmp oge", _abs(b, rest), divisor)), [rest]

    (rest,) = b.while_loop([a], step)
    rest = b.select(b.compare("fcmp olt", rest, 0.0), b.add(rest, divisor), rest)
    finite = b.compare("fcmp one", a, inf)
    rest = b.select(b.binary("and", finite, b.compare("fcmp oeq", divisor, inf)), a, rest)
    return _with_sign(b, rest, x)


def in_double(function: Function) -> Function:
    """A double function, for either type."""

    def rounded(b: Builder, x: Value) -> Value:
        return b.convert("fptrunc", function(b, b.convert("fpext", x, "double")), x.element)

    return rounded


def _abs(b: Builder, x: Value) -> Value:
    return b.intrinsic("fabs", x)


def _with_sign(b: Builder, magnitude: Value, sign: Value) -> Value:
    return b.intrinsic("copysign", magnitude, sign)


FUNCTIONS: dict[UnaryOp, Function] = {
    UnaryOp.EXP: exp,
    UnaryOp.LOG: log_,
    UnaryOp.TANH: tanh,
    UnaryOp.ERF: erf,
    UnaryOp.SIGMOID: sigmoid,
    UnaryOp.SIN: in_double(sin),
    UnaryOp.COS: in_double(cos),
    UnaryOp.TAN: in_double(tan),
    UnaryOp.ASIN: in_double(asin),
    UnaryOp.ACOS: in_double(acos),
    UnaryOp.ATAN: in_double(atan),
    UnaryOp.SINH: in_double(sinh),
    UnaryOp.COSH: in_double(cosh),
    UnaryOp.ASINH: in_double(asinh),
    UnaryOp.ACOSH: in_double(acosh),
    UnaryOp.ATANH: in_double(atanh),
}
