/* The tables of operations and types, and the constants that C and Python share. Called under the GIL. */
#include "python/helpers.h"

#include "core/plan.h"
#include "execute/agreement.h"
#include "python/methods.h"

/* Return {name: (code, bytes, mpi name, kind)}, the rows of dtype.def. */
static PyObject *datatypes(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  PyObject *result = PyDict_New();
  for (const struct datatype *row = datatype_table; result != NULL && row->name != NULL; row++)
    if (dict_put(result, row->name, Py_BuildValue("(inss)", row->code, (Py_ssize_t)row->bytes, row->mpi, row->kind)) <
        0)
      Py_CLEAR(result);
  return result;
}

/* Set the MPI datatype for XLA's type `code`. */
static PyObject *set_datatype(PyObject *Py_UNUSED(self), PyObject *args) {
  int code;
  Py_ssize_t handle;
  if (!PyArg_ParseTuple(args, "in", &code, &handle)) return NULL;
  if (datatype_find(code) == NULL) return PyErr_Format(PyExc_ValueError, "no row of dtype.def has the code %d", code);
  runtime.datatypes[code] = (intptr_t)handle;
  runtime.known[code] = true;
  Py_RETURN_NONE;
}

/* Return a list of pairs (name, kind). */
static PyObject *pairs(int count, const char *const names[], const char *const kinds[]) {
  PyObject *list = PyList_New(0);
  for (int i = 0; list != NULL && i < count; i++) {
    PyObject *pair = Py_BuildValue("(ss)", names[i], kinds[i]);
    if (pair == NULL || PyList_Append(list, pair) < 0) Py_CLEAR(list);
    Py_XDECREF(pair);
  }
  return list;
}

static PyObject *operation_row(const struct operation *row, const char *shown, int function) {
  static const char *const roles[][2] = {[ROLE_READ] = {"read", "read_each"},
                                         [ROLE_WRITE] = {"write", "write_each"},
                                         [ROLE_HOST_READ] = {"host_read", "host_read_each"},
                                         [ROLE_HOST_WRITE] = {"host_write", "host_write_each"}};
  static const char *const kinds[] = {[KIND_RANK] = "rank",           [KIND_TAG] = "tag",
                                      [KIND_OBJECT] = "object",       [KIND_OBJECT_OR_0] = "object_or_0",
                                      [KIND_REDUCTION] = "reduction", [KIND_DERIVATIVE] = "derivative",
                                      [KIND_NUMBER] = "number",       [KIND_FUNCTION] = "function",
                                      [KIND_PLAN] = "plan",           [KIND_PLAIN] = "plain",
                                      [KIND_ADJOINT] = "adjoint",     [KIND_LEAF] = "leaf"};
  const char *names[MAX_ROLES + MAX_ATTRIBUTES], *of[MAX_ROLES + MAX_ATTRIBUTES];
  for (int i = 0; i < row->buffer_count; i++) {
    names[i] = row->buffers[i].name;
    of[i] = roles[row->buffers[i].role][row->buffers[i].each];
  }
  PyObject *buffers = pairs(row->buffer_count, names, of);
  for (int i = 0; i < row->attribute_count; i++) {
    names[i] = row->attributes[i].name;
    of[i] = kinds[row->attributes[i].kind];
  }
  if (buffers == NULL) return NULL;
  return Py_BuildValue("(sNNsi)", row->id, buffers, pairs(row->attribute_count, names, of), shown, function);
}

/* Return {name: (row, [(buffer, role)], [(attribute, kind)], shown, function)}, from ops.def. Each row, and each
 * function with the row that the function calls. Roles: read, write, host_read, host_write, with _each behind for a
 * list. `shown`: the name that users know. `function`: the number of a function, 0 for a row. */
static PyObject *operations(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  PyObject *result = PyDict_New();
  for (const struct operation *row = operation_table; result != NULL && row->id != NULL; row++)
    if (dict_put(result, row->id, operation_row(row, row->name, FUNCTION_OF_ROW)) < 0) Py_CLEAR(result);
  for (int i = FUNCTION_OF_ROW + 1; result != NULL && i < FUNCTION_COUNT; i++) {
    const struct function *function = &function_table[i];
    if (dict_put(result, function->id, operation_row(&operation_table[function->row], function->name, i)) < 0)
      Py_CLEAR(result);
  }
  return result;
}

static const char *const derivatives[] = {"value", "tangent", "cotangent", "further", NULL};
static const char *const leaves[] = {"alone", "first", "middle", "last", NULL};
static const char *const actions[] = {"report", "abort", NULL};
static const char *const begins[] = {[BEGINS_AS_OPERANDS] = "operands",
                                     [BEGINS_AS_ZERO] = "zero",
                                     [BEGINS_COVERED] = "covered",
                                     [BEGINS_AS_MESSAGES] = "messages",
                                     NULL};
static const char *const combinations[] = {
    [COMBINE_NOT] = "none", [COMBINE_SUM] = "SUM", [COMBINE_MAX] = "MAX", [COMBINE_MIN] = "MIN", NULL};
static const char *const plan_header[] = {
#define NAME(name) #name,
    PLAN_HEADER(NAME)
#undef NAME
        NULL};

static PyObject *names_tuple(const char *const names[]) {
  Py_ssize_t count = 0;
  while (names[count] != NULL) count++;
  PyObject *tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; tuple != NULL && i < count; i++) {
    PyObject *name = PyUnicode_FromString(names[i]);
    if (name == NULL || PyTuple_SetItem(tuple, i, name) < 0) Py_CLEAR(tuple); /* the item is stolen */
  }
  return tuple;
}

/* Return {name: number or tuple of names}. What C and Python must know alike. A tuple contains the names of the numbers
 * from 0 on; PLAN_HEADER contains the names of the numbers with which a plan begins. Called after configure(most_tag=).
 * */
static PyObject *constants(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  const struct {
    const char *name;
    int64_t value;
  } numbers[] = {
      {"TRACED", TRACED},
      {"ANY_OF_SEVERAL", ANY_OF_SEVERAL},
      {"TOO_LARGE", TOO_LARGE},
      {"LABEL_BYTES", LABEL_BYTES},
      {"MAX_BOX_AXES", MAX_BOX_AXES},
      {"MOST_ARRAYS", MOST_ARRAYS},
      {"IMPOSSIBLE_COUNT", IMPOSSIBLE_COUNT},
      {"NO_SUCH_RANK", NO_SUCH_RANK},
      {"OTHER_ARRAYS", OTHER_ARRAYS},
      {"NAME_OF_DEFAULT", NAME_OF_DEFAULT},
      {"NAME_OF_WORLD", NAME_OF_WORLD},
      {"FIRST_TAG_OF_PLANS", notices_tag()},
      {"FIRST_TAG_OF_DERIVATIVES", derivatives_tag()},
  };
  static const struct {
    const char *name;
    const char *const *names;
  } lists[] = {{"DERIVATIVES", derivatives},   {"LEAVES", leaves},          {"ACTIONS", actions}, {"BEGINS", begins},
               {"COMBINATIONS", combinations}, {"PLAN_HEADER", plan_header}};
  PyObject *result = PyDict_New();
  for (size_t i = 0; result != NULL && i < sizeof numbers / sizeof *numbers; i++)
    if (dict_put(result, numbers[i].name, PyLong_FromLongLong(numbers[i].value)) < 0) Py_CLEAR(result);
  for (size_t i = 0; result != NULL && i < sizeof lists / sizeof *lists; i++)
    if (dict_put(result, lists[i].name, names_tuple(lists[i].names)) < 0) Py_CLEAR(result);
  return result;
}

PyMethodDef tables_methods[] = {
    {"datatypes", datatypes, METH_NOARGS, NULL},
    {"set_datatype", set_datatype, METH_VARARGS, NULL},
    {"operations", operations, METH_NOARGS, NULL},
    {"constants", constants, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
