#include "core/operation.h"

#define OPERATION_ROWS const struct operation operation_table[]
#include "core/operation_rows.def"

const struct function function_table[] = {
    [FUNCTION_OF_ROW] = {"", 0, "", 0},
#define OPERATION(name, engine, divisibility, buffers, attributes)
#define FUNCTION(id, operation, shown, compared) {#id, ROW_##operation, shown, FUNCTION_##compared},
#include "core/ops.def"
#undef OPERATION
};

int function_of(const struct operation *operation, const int64_t attributes[]) {
  int i = attribute_of(operation, KIND_FUNCTION);
  int64_t function = i >= 0 ? attributes[i] : FUNCTION_OF_ROW;
  bool known = function > FUNCTION_OF_ROW && function < FUNCTION_COUNT;
  return known && function_table[function].row == operation->row ? (int)function : FUNCTION_OF_ROW;
}

const char *operation_name(const struct operation *operation, const int64_t attributes[]) {
  int function = function_of(operation, attributes);
  return function != FUNCTION_OF_ROW ? function_table[function].name : operation->name;
}

enum {
#define DATATYPE(code, name, bytes, mpi, kind) TYPE_##name,
#include "core/dtype.def"
#undef DATATYPE
};

const struct datatype datatype_table[] = {
#define DATATYPE(code, name, bytes, mpi, kind) {code, #name, bytes, #mpi, #kind},
#include "core/dtype.def"
#undef DATATYPE
    {0, NULL, 0, NULL, NULL}};

const struct datatype *datatype_find(int code) {
  static const struct datatype *const by_code[DTYPE_CODES] = {
#define DATATYPE(code, name, bytes, mpi, kind) [code] = &datatype_table[TYPE_##name],
#include "core/dtype.def"
#undef DATATYPE
  };
  return code >= 0 && code < DTYPE_CODES ? by_code[code] : NULL;
}

const char *derivative_name(int64_t derivative) {
  static const char *const names[] = {[DERIVATIVE_VALUE] = "a value",
                                      [DERIVATIVE_TANGENT] = "a tangent",
                                      [DERIVATIVE_COTANGENT] = "a cotangent",
                                      [DERIVATIVE_FURTHER] = "a value in a further derivative"};
  return derivative >= 0 && derivative < (int64_t)(sizeof names / sizeof *names) ? names[derivative] : NULL;
}
