/* The two loops that run at every record, as outline.py and statistics/tensors.py write them in
 * Python: the walk over an event's values, and the measuring of its tensors. A third collects the
 * code positions of a stack.
 *
 * Only the limited API of Python 3.10 is used and nothing of torch but attributes and methods of its
 * tensors, so one build serves all later versions of both. Whatever is not the common case is left
 * to the Python code: `scan` calls `other` for it, `measure` stops in front of it.
 */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAX_DEPTH 400 /* outline.py cuts what is nested deeper, so it gets what reaches this */

typedef int (*measure_function)(const void *data, Py_ssize_t count, void *row, int code);

/* Given once by bind(). */
static PyObject *tensor_type, *parameter_type, *null_leaf, *scalar_leaves, *empty_mapping;
static PyObject *data_ptr, *is_contiguous, *is_neg, *numel;
static measure_function measure_memory;
static Py_ssize_t row_bytes, large_count;
static uint64_t lowest_address;

static PyObject *s_dtype, *s_shape, *s_requires_grad, *s_is_cpu;
static PyObject *s_code, *s_lasti, *s_back;
static PyObject *zero;

static int is_plain(PyObject *value) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    return type == tensor_type || type == parameter_type;
}

/* ------------------------------------------------------------------------------------- the walk */

typedef struct {
    PyObject *tensors, *values, *scalar_ids, *transformed, *other;
    int keeps_plain;
} walk;

static PyObject *node_of(const walk *w, PyObject *value, int depth);

static PyObject *tensor_node(const walk *w, PyObject *tensor) {
    PyObject *node = NULL, *dtype = PyObject_GetAttr(tensor, s_dtype), *shape = NULL, *grad = NULL;
    if (dtype && (shape = PyObject_GetAttr(tensor, s_shape)) &&
        (grad = PyObject_GetAttr(tensor, s_requires_grad)) &&
        PyList_Append(w->tensors, tensor) == 0 && PyList_Append(w->values, zero) == 0)
        node = PyTuple_Pack(3, dtype, shape, grad);
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(grad);
    return node;
}

static PyObject *other_node(const walk *w, PyObject *value, int depth) {
    PyObject *number = PyLong_FromLong(depth), *node = NULL;
    if (number)
        node = PyObject_CallFunctionObjArgs(
            w->other, w->tensors, w->values, w->transformed, value, number, NULL);
    Py_XDECREF(number);
    return node;
}

static PyObject *sequence_node(const walk *w, PyObject *items, int depth) {
    int is_tuple = PyTuple_CheckExact(items);
    Py_ssize_t size = is_tuple ? PyTuple_Size(items) : PyList_Size(items);
    PyObject *node = PyTuple_New(size + 1);
    if (!node) return NULL;
    Py_INCREF((PyObject *)&PyList_Type);
    PyTuple_SetItem(node, 0, (PyObject *)&PyList_Type);
    for (Py_ssize_t i = 0; i < size; i++) {
        /* Borrowed, and a list may change while Python code runs. */
        PyObject *item = is_tuple ? PyTuple_GetItem(items, i) : PyList_GetItem(items, i);
        PyObject *child = NULL;
        if (item) {
            Py_INCREF(item);
            child = node_of(w, item, depth + 1);
            Py_DECREF(item);
        }
        if (!child) {
            Py_DECREF(node);
            return NULL;
        }
        PyTuple_SetItem(node, i + 1, child);
    }
    return node;
}

/* A number or text whose JSON text has an id already; NULL without an error when it has none. */
static PyObject *scalar_node(const walk *w, PyObject *value, PyObject *leaf) {
    PyObject *key = PyTuple_Pack(2, (PyObject *)Py_TYPE(value), value), *id;
    if (!key) return NULL;
    id = PyDict_GetItemWithError(w->scalar_ids, key);
    Py_DECREF(key);
    if (!id || PyList_Append(w->values, id) < 0) return NULL;
    Py_INCREF(leaf);
    return leaf;
}

static PyObject *node_of(const walk *w, PyObject *value, int depth) {
    if (w->keeps_plain && is_plain(value)) return tensor_node(w, value);
    if (value == Py_None) {
        if (PyList_Append(w->values, zero) < 0) return NULL;
        Py_INCREF(null_leaf);
        return null_leaf;
    }
    if ((PyTuple_CheckExact(value) || PyList_CheckExact(value)) && depth < MAX_DEPTH)
        return sequence_node(w, value, depth);
    if (PyDict_CheckExact(value) && PyDict_Size(value) == 0) {
        Py_INCREF(empty_mapping);
        return empty_mapping;
    }
    PyObject *leaf = PyDict_GetItemWithError(scalar_leaves, (PyObject *)Py_TYPE(value));
    if (leaf) {
        PyObject *node = scalar_node(w, value, leaf);
        if (node || PyErr_Occurred()) return node;
    } else if (PyErr_Occurred()) {
        return NULL;
    }
    return other_node(w, value, depth);
}

PyDoc_STRVAR(scan_doc,
"scan(part, parts, tensors, values, scalar_ids, transformed, other) -> tuple\n\n"
"The key of an event's outline; its tensors and value ids are appended to the lists.\n"
"`other(tensors, values, transformed, value, depth)` does the same for one rarer value.");

static PyObject *scan(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 7 || !PyTuple_CheckExact(args[1]) || !PyList_CheckExact(args[2]) ||
        !PyList_CheckExact(args[3]) || !PyDict_CheckExact(args[4])) {
        PyErr_SetString(PyExc_TypeError, "scan: takes str, tuple, list, list, dict, bool, callable");
        return NULL;
    }
    const walk w = {args[2], args[3], args[4], args[5], args[6], args[5] == Py_False};
    PyObject *parts = args[1];
    Py_ssize_t size = PyTuple_Size(parts);
    PyObject *key = PyTuple_New(2 * size + 1);
    if (!key) return NULL;
    Py_INCREF(args[0]);
    PyTuple_SetItem(key, 0, args[0]);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *field = PyTuple_GetItem(parts, i), *node = NULL, *name = NULL;
        if (field && PyTuple_Check(field) && PyTuple_Size(field) == 2) {
            name = PyTuple_GetItem(field, 0);
            node = node_of(&w, PyTuple_GetItem(field, 1), 0);
        } else if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "scan: parts are (name, value) pairs");
        }
        if (!node) {
            Py_DECREF(key);
            return NULL;
        }
        Py_INCREF(name);
        PyTuple_SetItem(key, 2 * i + 1, name);
        PyTuple_SetItem(key, 2 * i + 2, node);
    }
    return key;
}

/* ------------------------------------------------------------------------------------ measuring */

static int is_true(PyObject *owned) {
    int answer = owned == Py_True;
    Py_XDECREF(owned);
    return answer;
}

static int64_t as_integer(PyObject *owned) {
    int64_t value = owned ? PyLong_AsLongLong(owned) : -1;
    Py_XDECREF(owned);
    return value;
}

static PyObject *call(PyObject *method, PyObject *tensor) {
    return PyObject_CallFunctionObjArgs(method, tensor, NULL);
}

/* 1 when the row is filled; 0, perhaps with an error set, when this is not a common case. */
static int measure_one(PyObject *tensor, char *row, PyObject *codes) {
    PyObject *dtype = PyObject_GetAttr(tensor, s_dtype), *code;
    if (!dtype) return 0;
    code = PyDict_GetItemWithError(codes, dtype);
    Py_DECREF(dtype);
    if (!code || !is_true(PyObject_GetAttr(tensor, s_is_cpu))) return 0;
    int64_t address = as_integer(call(data_ptr, tensor));
    if (address < 0 || (uint64_t)address < lowest_address) return 0;
    if (!is_true(call(is_contiguous, tensor))) return 0;
    PyObject *negated = call(is_neg, tensor);
    if (negated != Py_False) {
        Py_XDECREF(negated);
        return 0;
    }
    Py_DECREF(negated);
    int64_t count = as_integer(call(numel, tensor));
    if (count < 0) return 0;
    int number = (int)PyLong_AsLong(code), inexact;
    const void *data = (const void *)(uintptr_t)address;
    if (count < large_count) {
        inexact = measure_memory(data, (Py_ssize_t)count, row, number);
    } else {
        Py_BEGIN_ALLOW_THREADS
        inexact = measure_memory(data, (Py_ssize_t)count, row, number);
        Py_END_ALLOW_THREADS
    }
    return !inexact;
}

PyDoc_STRVAR(measure_doc,
"measure(tensors, start, rows, codes) -> int\n\n"
"Measure the tensors from `start` on into rows from address `rows`, up to the first that is not\n"
"a dense, plain CPU tensor or whose row would not be exact; returns its index. `codes` maps\n"
"dtypes to the kernel's numbers.");

static PyObject *measure(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 4 || !PyList_CheckExact(args[0]) || !PyDict_CheckExact(args[3])) {
        PyErr_SetString(PyExc_TypeError, "measure: takes list, int, int, dict");
        return NULL;
    }
    Py_ssize_t index = PyLong_AsSsize_t(args[1]);
    char *row = PyLong_AsVoidPtr(args[2]);
    if (PyErr_Occurred()) return NULL;
    for (; index < PyList_Size(args[0]); index++, row += row_bytes) {
        PyObject *tensor = PyList_GetItem(args[0], index);
        if (!tensor || !is_plain(tensor)) break;
        Py_INCREF(tensor);
        int done = measure_one(tensor, row, args[3]);
        Py_DECREF(tensor);
        if (!done) break;
    }
    PyErr_Clear(); /* a tensor without memory raises; Python finds out why */
    return PyLong_FromSsize_t(index);
}

/* --------------------------------------------------------------------------------------- stacks */

PyDoc_STRVAR(positions_doc,
"positions(frame) -> bytes\n\n"
"Where a frame and its callers are: the address of its code and its last instruction, for each.");

#define STEP 64 /* frames that are looked at before memory is asked for */

static PyObject *positions(PyObject *self, PyObject *frame) {
    (void)self;
    int64_t first[2 * STEP], *found = first;
    Py_ssize_t depth = 0, room = STEP;
    PyObject *key = NULL;
    Py_INCREF(frame);
    while (frame && frame != Py_None) {
        if (depth == room) {
            int64_t *more = PyMem_Malloc(2 * (size_t)(2 * room) * sizeof *more);
            if (!more) break;
            memcpy(more, found, 2 * (size_t)depth * sizeof *more);
            if (found != first) PyMem_Free(found);
            found = more;
            room *= 2;
        }
        PyObject *code = PyObject_GetAttr(frame, s_code);
        found[2 * depth] = (int64_t)(uintptr_t)code;
        Py_XDECREF(code);
        found[2 * depth + 1] = as_integer(code ? PyObject_GetAttr(frame, s_lasti) : NULL);
        depth++;
        PyObject *back = PyErr_Occurred() ? NULL : PyObject_GetAttr(frame, s_back);
        Py_DECREF(frame);
        frame = back;
    }
    if (frame == Py_None)
        key = PyBytes_FromStringAndSize((const char *)found, 2 * depth * (Py_ssize_t)sizeof *found);
    else if (!PyErr_Occurred())
        PyErr_NoMemory();
    Py_XDECREF(frame);
    if (found != first) PyMem_Free(found);
    return key;
}

/* --------------------------------------------------------------------------------------- set-up */

static void keep(PyObject **place, PyObject *value) {
    Py_INCREF(value);
    Py_XDECREF(*place);
    *place = value;
}

PyDoc_STRVAR(bind_doc,
"bind(tensor_type, parameter_type, tensor_base, null_leaf, scalar_leaves, empty_mapping)\n\n"
"Say what the other functions work with.");

static PyObject *bind(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tensor, *parameter, *base, *null, *scalars, *empty;
    if (!PyArg_ParseTuple(args, "OOOOO!O", &tensor, &parameter, &base, &null, &PyDict_Type, &scalars, &empty))
        return NULL;
    static const char *const names[] = {"data_ptr", "is_contiguous", "is_neg", "numel"};
    PyObject **const places[] = {&data_ptr, &is_contiguous, &is_neg, &numel};
    for (int i = 0; i < 4; i++) {
        PyObject *method = PyObject_GetAttrString(base, names[i]);
        if (!method) return NULL;
        keep(places[i], method);
        Py_DECREF(method);
    }
    keep(&tensor_type, tensor);
    keep(&parameter_type, parameter);
    keep(&null_leaf, null);
    keep(&scalar_leaves, scalars);
    keep(&empty_mapping, empty);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_doc,
"use(function, row_bytes, large_count, lowest_address)\n\n"
"The address of the statistics kernel's function, the size of a row, from how many elements on\n"
"other threads run meanwhile, and below which address nothing is read.");

static PyObject *use(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long function, lowest;
    if (!PyArg_ParseTuple(args, "KnnK", &function, &row_bytes, &large_count, &lowest)) return NULL;
    measure_memory = (measure_function)(uintptr_t)function;
    lowest_address = lowest;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"scan", (PyCFunction)(void (*)(void))scan, METH_FASTCALL, scan_doc},
    {"measure", (PyCFunction)(void (*)(void))measure, METH_FASTCALL, measure_doc},
    {"positions", positions, METH_O, positions_doc},
    {"bind", bind, METH_VARARGS, bind_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_walk", "Loops of the hot path.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__walk(void) {
    static const char *const names[] = {
        "dtype", "shape", "requires_grad", "is_cpu", "f_code", "f_lasti", "f_back"};
    PyObject **const places[] = {
        &s_dtype, &s_shape, &s_requires_grad, &s_is_cpu, &s_code, &s_lasti, &s_back};
    for (int i = 0; i < 7; i++)
        if (!*places[i] && !(*places[i] = PyUnicode_InternFromString(names[i]))) return NULL;
    if (!zero && !(zero = PyLong_FromLong(0))) return NULL;
    return PyModule_Create(&definition);
}
