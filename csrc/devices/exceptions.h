/* Calls of a C++ library from C: an exception becomes a return value.
 *
 * An exception that passed through a function of ours would leave locks taken. C has no way to catch an exception, but
 * the unwinder that all compilers for Linux use has an interface in C. `exceptions_catch` calls a function in a frame
 * with a personality routine of ours, which stops every exception there. The frame is written in assembly, for x86-64.
 *
 * Threads: exceptions_load is called once, before exceptions_catch, which takes no lock.
 */
#ifndef JAXMPI_EXCEPTIONS_H
#define JAXMPI_EXCEPTIONS_H

#include <stdbool.h>
#include <stddef.h>

/* A class of exceptions: the mangled name, and the function that returns the text of an exception. */
struct exception_class {
  const char *name;
  const char *(*what)(const void *exception);
};

/* Find the functions of the C++ runtime that a library uses. Return NULL, or the name of a missing function. */
const char *exceptions_load(void *library);

/* Call function(data). Return whether it threw an exception. Then `text` has the text of an exception of `class`, and
 * for any other exception the mangled name of the class. */
bool exceptions_catch(void (*function)(void *), void *data, const struct exception_class *class, char text[],
                      size_t room);

#endif
