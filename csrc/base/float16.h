/* Conversion between 16-bit floating-point numbers and float, in plain C11.
 *
 * float16 is IEEE 754 binary16; bfloat16 is the upper half of a binary32. Conversion to 16 bits rounds to nearest,
 * ties to even. Infinities and NaN are kept (a NaN becomes quiet, and the payload may be truncated).
 *
 * Threads: pure functions, for any thread; MPI calls the reductions that use them inside MPI functions.
 */
#ifndef JAXMPI_FLOAT16_H
#define JAXMPI_FLOAT16_H

#include <stdint.h>
#include <string.h>

static inline float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bfloat16_to_float(uint16_t x) { return float_from_bits((uint32_t)x << 16); }

static inline uint16_t bfloat16_from_float(float value) {
  uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x0040u); /* NaN */
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float float16_to_float(uint16_t x) {
  uint32_t sign = (uint32_t)(x & 0x8000u) << 16;
  uint32_t magnitude = x & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return float_from_bits(sign | ((magnitude << 13) + 0x38000000u));
  /* Subnormal or zero: an integer multiple of 2^-24, exact in float. */
  float value = (float)magnitude * 0x1p-24f;
  return float_from_bits(sign | float_bits(value));
}

static inline uint16_t float16_from_float(float value) {
  uint32_t bits = float_bits(value);
  uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((bits >> 13) & 0x3ffu)); /* NaN */
  if (bits >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);                          /* 65536 and above */
  if (bits < 0x38800000u) {
    /* Below 2^-14 the result is a multiple of 2^-24, the spacing of floats from 0.5 on: adding 0.5 rounds to even. */
    float shifted = float_from_bits(bits) + 0.5f;
    return (uint16_t)(sign | (float_bits(shifted) - 0x3f000000u));
  }
  bits += 0x0fffu + ((bits >> 13) & 1u); /* may carry into the exponent, up to infinity */
  return (uint16_t)(sign | ((bits - 0x38000000u) >> 13));
}

#endif
