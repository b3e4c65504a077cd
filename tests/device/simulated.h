/* What the tests of a device's memory share: the fake driver, named by FAKE_DRIVER, under the core, and `main`. */
#ifndef JAXMPI_SIMULATED_H
#define JAXMPI_SIMULATED_H

#include "fake_driver.h"
#include "harness.h"

extern struct fake_driver *driver;
extern const struct memory *space; /* that of the driver */

/* Gives back all that was taken of the driver, and checks that nothing of it is left and no rule was broken; also after
 * each test. */
void finish(void);

/* The transports, and their names by number. */
extern const enum transport transports[3];
extern const char *const transport_names[3];

/* Those that leave calls to the stream. */
extern const enum transport leaving[2];

/* Calls go by this transport from now on. For TEST_THROUGH: on all transports, and on those that leave calls. */
void on(enum transport transport, bool aware);
void on_all(void (*test)(void));
void on_leaving(void (*test)(void));

/* For TEST_THROUGH: only where streams take calls of MPI. */
void where_calls_are_left(void (*test)(void));

/* How often the driver's function with one of these names was called. */
int calls(const char *cuda, const char *hip, const char *sycl);

/* An array of `count` elements, or NONE for -1; and how many bytes it has. */
struct array array_of(int dtype, void *data, int64_t count);
size_t array_bytes(int dtype, int64_t count);

/* Calls an operation on arrays of the device, as XLA does. */
ffi_error *give(const char *operation, struct array in, struct array out, const int64_t attributes[]);
#define GIVE(operation, in, out, ...) give(operation, in, out, (const int64_t[]){__VA_ARGS__})

/* The same on copies of arrays of the host, whose results it copies back; waits for the stream. Arrays at one place are
 * at one place there. `lying`, if it is not NULL, becomes where they were. */
ffi_error *call_there(const char *operation, const struct array in[], int in_count, const struct array out[],
                      int out_count, const int64_t attributes[], const void *lying[]);

/* An operation has left a failure with this text to the next one. */
void was_left(const char *text);

/* Of both drivers; ends with NULL. */
extern const char *const driver_functions[];

/* Whether a thread of ours calls the driver, too, so that a failure may hit it, and no call. */
extern bool driver_has_others;

/* Lets each function of the driver fail in turn, at its first call, its second and so on. `call` makes a call of this
 * operation: an error that names the function, or, where it is called less often, none. Afterwards the same call
 * succeeds. `what` describes the call. */
void driver_fails(const char *what, const char *operation, ffi_error *(*call)(void *data), void *data);

#endif
