/* float16 and bfloat16: conversions for every bit pattern, and the reductions, against arithmetic in double.
 *
 * The reference describes a format by two numbers and decodes with ldexp. It finds the value nearest to a number by
 * bisection in the sorted list of all values, so it shares nothing with the bit operations under test.
 */
#include "base/float16.h"

#include <math.h>

#include "harness.h"

struct format {
  const char *name;
  int dtype, exponent_bits, mantissa_bits;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
};
static const struct format formats[] = {
    {"float16", F16, 5, 10, float16_to_float, float16_from_float},
    {"bfloat16", BF16, 8, 7, bfloat16_to_float, bfloat16_from_float},
};
enum { SIGN = 0x8000, MAGNITUDES = 0x8000 };

/* --- the reference --- */

static int infinity_of(const struct format *f) { return ((1 << f->exponent_bits) - 1) << f->mantissa_bits; }

static bool is_nan(const struct format *f, int bits) { return (bits & ~SIGN) > infinity_of(f); }

/* The value of a finite pattern; of infinity's, the number that would be next: 2 to the power of the bias + 1. */
static double decode(const struct format *f, int bits) {
  int bias = (1 << (f->exponent_bits - 1)) - 1, magnitude = bits & ~SIGN;
  int exponent = magnitude >> f->mantissa_bits, fraction = magnitude & ((1 << f->mantissa_bits) - 1);
  double value = exponent == 0 ? ldexp(fraction, 1 - bias - f->mantissa_bits)
                               : ldexp((1 << f->mantissa_bits) + fraction, exponent - bias - f->mantissa_bits);
  return bits & SIGN ? -value : value;
}

/* The pattern nearest to a number that is no NaN; of two equally near the even one. */
static int nearest(const struct format *f, double value) {
  double magnitude = fabs(value);
  int low = 0, high = infinity_of(f), sign = signbit(value) ? SIGN : 0;
  if (magnitude >= decode(f, high)) return sign | high;
  while (high - low > 1) { /* decode(low) <= magnitude < decode(high) */
    int middle = (low + high) / 2;
    if (decode(f, middle) <= magnitude)
      low = middle;
    else
      high = middle;
  }
  double below = magnitude - decode(f, low), above = decode(f, high) - magnitude;
  bool up = above < below || (above == below && low % 2 == 1);
  return sign | (up ? high : low);
}

static void check_narrow(const struct format *f, float value) {
  int want = nearest(f, (double)value), got = f->narrow(value);
  if (got == want) return;
  context("%s of %a", f->name, (double)value);
  CHECK_EQUAL(got, want);
}

static uint32_t random_bits(void) {
  static uint64_t state = 0x853c49e6748fea9bull;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(state >> 32);
}

/* --- conversions --- */

TEST(every_pattern_widens) {
  FOR_EACH (const struct format *, f, formats)
    for (int bits = 0; bits <= 0xffff; bits++) {
      float got = f->widen((uint16_t)bits);
      context("%s %04x", f->name, (unsigned)bits);
      if (!CHECK_EQUAL(!!signbit(got), bits >> 15)) return;
      if (is_nan(f, bits))
        CHECK(isnan(got));
      else if ((bits & ~SIGN) == infinity_of(f))
        CHECK(isinf(got));
      else
        CHECK((double)got == decode(f, bits));
    }
}

TEST(every_pattern_returns) {
  FOR_EACH (const struct format *, f, formats)
    for (int bits = 0; bits <= 0xffff; bits++) {
      int back = f->narrow(f->widen((uint16_t)bits)), quiet = 1 << (f->mantissa_bits - 1);
      context("%s %04x", f->name, (unsigned)bits);
      CHECK_EQUAL(back, is_nan(f, bits) ? bits | quiet : bits);
    }
}

/* A number halfway between two neighbours, and those next to it in float; infinity is a neighbour too. */
TEST(ties_go_to_even) {
  FOR_EACH (const struct format *, f, formats)
    for (int bits = 0; bits < infinity_of(f); bits++)
      for (int sign = 1; sign >= -1; sign -= 2) {
        float middle = (float)(sign * (decode(f, bits) + decode(f, bits + 1)) / 2);
        CHECK((double)middle == sign * (decode(f, bits) + decode(f, bits + 1)) / 2);
        CHECK_EQUAL(f->narrow(middle) & 1, 0);
        check_narrow(f, middle);
        check_narrow(f, nextafterf(middle, INFINITY));
        check_narrow(f, nextafterf(middle, -INFINITY));
      }
}

TEST(any_float_goes_to_the_nearest) {
  FOR_EACH (const struct format *, f, formats)
    for (int i = 0; i < 200000; i++) {
      uint32_t bits = random_bits();
      if (i % 2) bits = (bits & 0x8fffffffu) | 0x30000000u; /* where float16 lives */
      float value = float_from_bits(bits);
      if (isnan(value))
        CHECK(is_nan(f, f->narrow(value)) && f->narrow(value) >> 15 == bits >> 31);
      else
        check_narrow(f, value);
    }
}

/* A NaN whose payload lies in the bits that are cut must not become infinite. */
TEST(a_nan_stays_one) {
  FOR_EACH (const struct format *, f, formats)
    for (int bit = 0; bit < 23; bit++)
      for (uint32_t sign = 0; sign < 2; sign++) {
        uint16_t got = f->narrow(float_from_bits(sign << 31 | 0x7f800000u | 1u << bit));
        context("%s, bit %d", f->name, bit);
        CHECK(is_nan(f, got));
        CHECK_EQUAL(got >> 15, sign);
        CHECK(got & 1 << (f->mantissa_bits - 1));
      }
}

/* --- reductions --- */

enum { SUM, PROD, MAX, MIN };

/* The result of one step; NaN where any is due. */
static float step(int op, float a, float b) {
  if (isnan(a) || isnan(b)) return NAN;
  if (op == SUM) return a + b;
  if (op == PROD) return a * b;
  return (op == MAX) == (a > b) ? a : b;
}

static void check_step(const struct format *f, int op, int a, int b, int got) {
  float want = step(op, f->widen((uint16_t)a), f->widen((uint16_t)b));
  bool equal = isnan(want) ? is_nan(f, got) : got == nearest(f, (double)want);
  if (op >= MAX && want == 0) equal = (got & ~SIGN) == 0; /* the sign of zero is either's */
  if (equal) return;
  context("%s, operation %d of %04x and %04x gave %04x", f->name, op, (unsigned)a, (unsigned)b, (unsigned)got);
  CHECK(equal);
}

/* All pairs of `x` and `y` in one call of the function that MPI would call. */
static void reduce_all(const struct format *f, int op, intptr_t handle, const uint16_t *x, const uint16_t *y,
                       int count) {
  static uint16_t in[4096], inout[4096], before[4096];
  memcpy(in, x, (size_t)count * 2);
  memcpy(before, x, (size_t)count * 2);
  memcpy(inout, y, (size_t)count * 2);
  inout[count] = 0xeeee;
  fake->apply(handle, in, inout, count);
  for (int i = 0; i < count; i++) check_step(f, op, x[i], y[i], inout[i]);
  CHECK_SAME(in, before, count * 2);
  CHECK_EQUAL(inout[count], 0xeeee);
}

/* Zeros, subnormals, neighbours of one, the largest, infinities and NaN, with both signs. */
static int specials(const struct format *f, uint16_t *list) {
  int one = nearest(f, 1), top = infinity_of(f), normal = 1 << f->mantissa_bits, count = 0;
  FOR_VALUES (int, bits, 0, 1, 2, 3, normal - 1, normal, normal + 1, one - 1, one, one + 1, one + 2, top - 2, top - 1,
              top, top + 1, 0x7fff, nearest(f, 3), nearest(f, 1. / 3)) {
    list[count++] = (uint16_t)*bits;
    list[count++] = (uint16_t)(*bits | SIGN);
  }
  return count;
}

TEST(own_operations_reduce) {
  static uint16_t x[2048], y[2048];
  uint16_t list[64];
  FOR_EACH (const struct format *, f, formats) {
    intptr_t handles[4];
    CHECK_EQUAL(abi->own_operations(f->dtype == BF16 ? "bfloat16" : "float16", handles), 0);
    for (int op = SUM; op <= MIN; op++) {
      int count = specials(f, list);
      for (int i = 0; i < count * count; i++) x[i] = list[i / count], y[i] = list[i % count];
      reduce_all(f, op, handles[op], x, y, count * count);
      for (int i = 0; i < 2048; i++) x[i] = (uint16_t)random_bits(), y[i] = (uint16_t)random_bits();
      reduce_all(f, op, handles[op], x, y, 2048);
      reduce_all(f, op, handles[op], x, y, 0);
      CHECK_EQUAL(fake->operation_free(handles[op]), 0);
    }
  }
}

/* Through the whole road: 2, 3 and 4 ranks sum one and one tenth, each step rounded. */
TEST(half_sums_go_through_allreduce) {
  FOR_EACH (const struct format *, f, formats) {
    intptr_t handles[4];
    CHECK_EQUAL(abi->own_operations(f->dtype == BF16 ? "bfloat16" : "float16", handles), 0);
    for (int size = 2; size <= 4; size++)
      for (int64_t limit = 1; limit <= 4; limit++) {
        uint16_t values[3] = {(uint16_t)nearest(f, 1.1), (uint16_t)nearest(f, -2.5), 1}, sums[4] = {0, 0, 0, 0xeeee};
        runtime.max_count = limit;
        SUCCEEDS(RUN("allreduce", ARRAY(f->dtype, values, 3), ARRAY(f->dtype, sums, 3), COMM(world(0, size)),
                     reduction_of(handles[SUM], REDUCER_OURS)));
        for (int i = 0; i < 3; i++) {
          int want = values[i];
          for (int r = 1; r < size; r++) want = nearest(f, decode(f, want) + decode(f, values[i]));
          CHECK_EQUAL(sums[i], want);
        }
        CHECK_EQUAL(sums[3], 0xeeee);
      }
    for (int op = SUM; op <= MIN; op++) CHECK_EQUAL(fake->operation_free(handles[op]), 0);
  }
}

/* When the third of four operations cannot be made, the two before it are given back. */
TEST(own_operations_give_back_what_they_made) {
  intptr_t handles[4];
  fake->fail("MPI_Op_create", 3, 77);
  CHECK_EQUAL(abi->own_operations("float16", handles), 77);
}

/* Modulo a power of two, at each place. */
TEST(small_integers_wrap) {
  static const struct {
    const char *dtype;
    size_t bytes;
  } kinds[] = {{"int8", 1}, {"uint8", 1}, {"int16", 2}, {"uint16", 2}};
  static uint8_t x[512], y[512], before[512];
  for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
    intptr_t handles[4];
    CHECK_EQUAL(abi->own_operations(kinds[k].dtype, handles), 0);
    CHECK(handles[SUM] != 0 && handles[PROD] == 0 && handles[MAX] == 0 && handles[MIN] == 0);
    for (int i = 0; i < 512; i++) x[i] = (uint8_t)random_bits(), before[i] = y[i] = (uint8_t)random_bits();
    int count = (int)(512 / kinds[k].bytes) - 1;
    fake->apply(handles[SUM], x, y, count);
    for (int i = 0; i < 512; i++) {
      int carry = kinds[k].bytes == 2 && i % 2 == 1 ? (x[i - 1] + before[i - 1]) >> 8 : 0;
      bool beyond = i >= count * (int)kinds[k].bytes;
      CHECK_EQUAL(y[i], beyond ? before[i] : (x[i] + before[i] + carry) & 255);
    }
    CHECK_EQUAL(fake->operation_free(handles[SUM]), 0);
  }
  intptr_t none[4];
  CHECK_EQUAL(abi->own_operations("int32", none), 0);
  CHECK(none[SUM] == 0);
}

/* Whoever has it, and at each place. */
TEST(nan_wins) {
  static const char *const names[] = {"float32", "float64"};
  for (int k = 0; k < 2; k++) {
    intptr_t handles[4];
    CHECK_EQUAL(abi->own_operations(names[k], handles), 0);
    CHECK(handles[SUM] == 0 && handles[PROD] == 0);
    for (int op = MAX; op <= MIN; op++) {
      double x[7] = {NAN, 1, NAN, 2, -1, INFINITY, 3}, y[7] = {1, NAN, NAN, 3, -2, 4, 9};
      float u[7], v[7];
      for (int i = 0; i < 7; i++) u[i] = (float)x[i], v[i] = (float)y[i];
      fake->apply(handles[op], k == 0 ? (void *)u : x, k == 0 ? (void *)v : y, 6);
      static const double expected[2][7] = {{NAN, NAN, NAN, 3, -1, INFINITY, 9}, {NAN, NAN, NAN, 2, -2, 4, 9}};
      for (int i = 0; i < 7; i++) {
        double got = k == 0 ? (double)v[i] : y[i], want = expected[op == MIN][i];
        CHECK(isnan(want) ? isnan(got) : got == want);
      }
      CHECK_EQUAL(fake->operation_free(handles[op]), 0);
    }
  }
}
