/* What the tests of a device's memory share: the fake driver, named by FAKE_DRIVER, under the core. */
#ifndef JAXMPI_SIMULATED_H
#define JAXMPI_SIMULATED_H

#include "fake_driver.h"
#include "harness.h"

extern struct fake_driver *driver;
extern const struct memory *space; /* that of the driver */

/* Gives back all that was taken of the driver, and checks that nothing of it is left and no rule was broken. */
void finish(void);

/* Opens the driver and runs the tests, as run_tests. */
int run_device_tests(int argc, char **argv, const struct test *tests, size_t count);

#endif
