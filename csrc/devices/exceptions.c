#include "devices/exceptions.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/symbols.h"

#if defined __x86_64__ && defined __linux__

#include <unwind.h>

/* Functions of the C++ runtime and of the unwinder that it uses. Our own library is linked with neither. */
static struct runtime_functions {
  void (*set_register)(struct _Unwind_Context *context, int number, _Unwind_Word value);
  void (*set_address)(struct _Unwind_Context *context, _Unwind_Ptr address);
  void *(*begin_catch)(void *exception);
  void (*end_catch)(void);
  const char *const *(*current_type)(void); /* a type_info: the table of virtual functions, then the name */
} cxx;

const char *exceptions_load(void *library) {
  static const struct symbol symbols[] = {
      {"_Unwind_SetGR", offsetof(struct runtime_functions, set_register), true},
      {"_Unwind_SetIP", offsetof(struct runtime_functions, set_address), true},
      {"__cxa_begin_catch", offsetof(struct runtime_functions, begin_catch), true},
      {"__cxa_end_catch", offsetof(struct runtime_functions, end_catch), true},
      {"__cxa_current_exception_type", offsetof(struct runtime_functions, current_type), true},
      {NULL, 0, false}};
  return symbols_load(library, symbols, &cxx); /* dlsym also looks in the libraries that the library needs */
}

/* Call function(data). Return 0, or 1 after an exception, to which `caught` then points. */
int exceptions_frame(void (*function)(void *), void *data, struct _Unwind_Exception **caught);
extern const char exceptions_landing[];
_Unwind_Reason_Code exceptions_personality(int version, _Unwind_Action actions, _Unwind_Exception_Class class,
                                           struct _Unwind_Exception *exception, struct _Unwind_Context *context);

/* Stop all exceptions, and let the end of a thread (pthread_exit, pthread_cancel) pass. Only the assembly names this
 * function. */
__attribute__((used)) _Unwind_Reason_Code exceptions_personality(int version, _Unwind_Action actions,
                                                                 _Unwind_Exception_Class class,
                                                                 struct _Unwind_Exception *exception,
                                                                 struct _Unwind_Context *context) {
  (void)class;
  if (version != 1) return _URC_FATAL_PHASE1_ERROR;
  if (actions & _UA_FORCE_UNWIND) return _URC_CONTINUE_UNWIND;
  if (actions & _UA_SEARCH_PHASE) return _URC_HANDLER_FOUND;
  if (!(actions & _UA_HANDLER_FRAME)) return _URC_CONTINUE_UNWIND;
  cxx.set_register(context, __builtin_eh_return_data_regno(0), (uintptr_t)exception);
  cxx.set_address(context, (uintptr_t)exceptions_landing);
  return _URC_INSTALL_CONTEXT;
}

/* 0x1b: the address of the routine is relative to the place where it stands, in 32 bits. At the landing the unwinder
 * has put the exception into rax. */
__asm__(
    ".text\n"
    ".globl exceptions_frame, exceptions_landing\n"
    ".hidden exceptions_frame, exceptions_landing, exceptions_personality\n"
    ".type exceptions_frame, @function\n"
    "exceptions_frame:\n"
    ".cfi_startproc\n"
    ".cfi_personality 0x1b, exceptions_personality\n"
    "  pushq %rbx\n"
    ".cfi_def_cfa_offset 16\n"
    ".cfi_offset %rbx, -16\n"
    "  movq %rdx, %rbx\n"
    "  movq %rdi, %rax\n"
    "  movq %rsi, %rdi\n"
    "  call *%rax\n"
    "  xorl %eax, %eax\n"
    "  popq %rbx\n"
    ".cfi_remember_state\n"
    ".cfi_def_cfa_offset 8\n"
    "  ret\n"
    "exceptions_landing:\n"
    ".cfi_restore_state\n"
    "  movq %rax, (%rbx)\n"
    "  movl $1, %eax\n"
    "  popq %rbx\n"
    ".cfi_def_cfa_offset 8\n"
    "  ret\n"
    ".cfi_endproc\n"
    ".size exceptions_frame, . - exceptions_frame\n");

/* Return whether an exception is one of GCC's C++ runtime, of this kind. 0: thrown, and the object lies behind the
 * exception; 1: rethrown. */
static bool is_cxx(const struct _Unwind_Exception *exception, char kind) {
  const char *class = (const char *)&exception->exception_class;
  return class[0] == kind && memcmp(class + 1, "++CCUNG", 7) == 0;
}

bool exceptions_catch(void (*function)(void *), void *data, const struct exception_class *class, char text[],
                      size_t room) {
  struct _Unwind_Exception *caught;
  if (exceptions_frame(function, data, &caught) == 0) return false;
  cxx.begin_catch(caught);
  const char *const *type = is_cxx(caught, 0) || is_cxx(caught, 1) ? cxx.current_type() : NULL;
  const char *name = type != NULL ? type[1] : "an exception of another language";
  bool known = strcmp(name, class->name) == 0 && is_cxx(caught, 0);
  snprintf(text, room, "%s", known ? class->what(caught + 1) : name);
  cxx.end_catch();
  return true;
}

#else

const char *exceptions_load(void *library) {
  (void)library;
  return "way to catch exceptions on this processor";
}

bool exceptions_catch(void (*function)(void *), void *data, const struct exception_class *class, char text[],
                      size_t room) {
  (void)class, (void)text, (void)room;
  return function(data), false;
}

#endif
