/* A fake loader of Level Zero, which counts devices. Environment, read at each use: FAKE_DEVICES, as for the fake
 * driver, and ZE_AFFINITY_MASK, of which the number of entries counts. */
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

static char only;

EXPORT int zeInit(unsigned flags);
EXPORT int zeDriverGet(uint32_t *count, void **drivers);
EXPORT int zeDeviceGet(void *driver, uint32_t *count, void **devices);

int zeInit(unsigned flags) { return flags != 1; }

int zeDriverGet(uint32_t *count, void **drivers) {
  if (drivers != NULL && *count > 0) drivers[0] = &only;
  *count = 1;
  return 0;
}

int zeDeviceGet(void *driver, uint32_t *count, void **devices) {
  const char *machine = getenv("FAKE_DEVICES"), *mask = getenv("ZE_AFFINITY_MASK");
  if (driver != &only || devices != NULL) return 1;
  *count = machine == NULL ? 1 : (uint32_t)strtoul(machine, NULL, 10);
  if (mask == NULL || *mask == '\0') return 0;
  uint32_t named = 1;
  for (; *mask != '\0'; mask++) named += *mask == ',';
  if (named < *count) *count = named;
  return 0;
}
