/* What all layers use: texts that are put together, and the hash. */
#include "base/hash.h"
#include "base/text.h"
#include "harness.h"

/* A text in an array is cut at the end of that, wherever a piece of it begins. */
TEST(a_text_in_an_array_is_cut) {
  static const char whole[] = "0123456789";
  for (size_t size = 1; size < 16; size++)
    for (size_t first = 0; first <= 10; first++) {
      char array[16];
      memset(array, '#', sizeof array);
      context("%zu bytes, the first piece of %zu", size, first);
      struct text text = text_in(array, size);
      text_add_characters(&text, whole, first);
      text_add(&text, "%s", whole + first);
      size_t length = size - 1 < 10 ? size - 1 : 10;
      CHECK_EQUAL(text.length, length);
      CHECK_EQUAL(text.cut, length < 10);
      CHECK_SAME(array, whole, length);
      CHECK_EQUAL(array[length], '\0');
      for (size_t i = size; i < sizeof array; i++) CHECK_EQUAL(array[i], '#');
    }
}

/* A text that grows has all of it, as one that snprintf writes at once. */
TEST(a_text_grows) {
  struct text text = {.grows = true};
  char right[1 << 14];
  size_t length = 0;
  text_shorten(&text, 0);
  CHECK_EQUAL(text.length, 0);
  draw_state = 7;
  while (length < sizeof right - 100) {
    int number = (int)draw(1000000), width = (int)draw(60);
    text_add(&text, "%*d,", width, number);
    length += (size_t)snprintf(right + length, sizeof right - length, "%*d,", width, number);
    text_add_characters(&text, "ab", draw(3));
    size_t more = text.length - length;
    memcpy(right + length, "ab", more);
    length += more;
  }
  CHECK(!text.cut);
  CHECK_EQUAL(text.length, length);
  CHECK_SAME(text.characters, right, length);
  CHECK_EQUAL(text.characters[length], '\0');
  text_shorten(&text, 0);
  text_add(&text, "again");
  CHECK(strcmp(text.characters, "again") == 0);
  free(text.characters);
}

/* By the published values of FNV-1a. */
TEST(the_hash_is_fnv_1a) {
  uint64_t hash = HASH_START;
  CHECK(hash == UINT64_C(0xcbf29ce484222325));
  for (const char *c = "foobar"; *c != '\0'; c++) hash = hash_add(hash, *c);
  CHECK(hash == UINT64_C(0x85944171f73967e8));
  CHECK(hash_fold(UINT64_C(0xf0f0f0f000000001), 32) == UINT64_C(0xf0f0f0f0f0f0f0f1));
}
