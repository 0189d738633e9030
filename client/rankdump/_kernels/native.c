/* The compiled kernels as a Python module of the limited API. Its functions take addresses and sizes
   as integers, use the variant for this processor, and release the interpreter's lock for large
   inputs. Callers keep the memory alive. numpy_twin.py has the same functions.

   A module that was built with a new Python is also used with older ones. There, Py_RETURN_NONE and
   similar macros take no reference, and formats with a size are other functions, so neither is used. */

#define Py_LIMITED_API 0x030a0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>

#include "kernels.h"
#include "small_file.h"

#ifdef HAS_AVX2
#include <cpuid.h>
#endif

/* Size in bytes below which the lock is kept: another thread might keep it for longer than the
   kernel runs. */
#define RELEASED_BYTES (1 << 18)

/* Size in bytes below which a copy keeps the lock: such a copy takes a tenth of a millisecond at
   most, and getting the lock back may take longer. */
#define RELEASED_COPY_BYTES (1 << 21)

#define RUN_RELEASED(is_released, call)                                                            \
    if (is_released) {                                                                             \
        Py_BEGIN_ALLOW_THREADS call;                                                               \
        Py_END_ALLOW_THREADS                                                                       \
    } else {                                                                                       \
        call;                                                                                      \
    }

#define RUN_KERNEL(bytes, call) RUN_RELEASED((bytes) >= RELEASED_BYTES, call)

struct variant {
    const char *name;
    void (*measure)(const unsigned char *, int64_t, int, int, struct moments *);
    void (*fingerprint)(const unsigned char *, const struct shard *, int, struct fingerprint *);
    void (*copy)(unsigned char *, const unsigned char *, const struct strided_copy *);
    void (*stream)(unsigned char *, const unsigned char *, int64_t);
};

#define VARIANT_OF(name)                                                                           \
    {#name, measure_elements_##name, fingerprint_shard_##name, copy_strided_##name,                \
     stream_memory_##name}

/* Variants: the first one runs on every processor, the last one is the fastest. */
static const struct variant variants[] = {
    VARIANT_OF(plain),
#ifdef HAS_AVX2
    VARIANT_OF(avx2),
#endif
#ifdef HAS_AVX512
    VARIANT_OF(avx512),
#endif
};

#define VARIANT_COUNT ((int)(sizeof variants / sizeof variants[0]))

static const struct variant *chosen = &variants[0];

static int can_run(int number)
{
    if (number == 0)
        return 1;
#ifdef HAS_AVX2
    unsigned eax, ebx, ecx, edx;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__get_cpuid(1, &eax, &ebx, &ecx, &edx)
        || !(ecx & bit_FMA) || !(ecx & bit_F16C))
        return 0;
    if (number == 1)
        return 1;
#endif
#ifdef HAS_AVX512
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
           && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return 0;
#endif
}

/* -- arguments ----------------------------------------------------------------------------------- */

static int check_count(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments given, %zd needed", given, wanted);
    return 0;
}

/* Reads arguments that give elements in memory, or in a bytes object of at least their size. */
static int read_elements(PyObject *data, PyObject *count, PyObject *code,
                         const unsigned char **elements, int64_t *found_count, int *found_code)
{
    *found_count = PyLong_AsLongLong(count);
    const long number = PyLong_AsLong(code);
    if (PyErr_Occurred())
        return 0;
    if (number < 0 || number >= ELEMENT_CODES || *found_count < 0
        || *found_count > INT64_MAX / element_bytes[number]) {
        PyErr_Format(PyExc_ValueError, "%lld elements of code %ld are not allowed",
                     (long long)*found_count, number);
        return 0;
    }
    *found_code = (int)number;
    if (!PyBytes_Check(data)) {
        *elements = PyLong_AsVoidPtr(data);
        return !PyErr_Occurred();
    }
    *elements = (const unsigned char *)PyBytes_AsString(data);
    if (PyBytes_Size(data) >= *found_count * element_bytes[number])
        return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes do not hold %lld elements", PyBytes_Size(data),
                 (long long)*found_count);
    return 0;
}

static int read_numbers(PyObject *tuple, int64_t *numbers, Py_ssize_t count)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_ValueError, "a tuple of %zd numbers is needed", count);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* Reads the extents of an array, which has 1 to MAX_DIMENSIONS axes and no negative extent; returns
   -1 with an error set. */
static int read_extents(PyObject *tuple, int64_t *extents)
{
    const Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : 0;
    if (count < 1 || count > MAX_DIMENSIONS) {
        PyErr_Format(PyExc_ValueError, "a tuple of 1 to %d extents is needed", MAX_DIMENSIONS);
        return -1;
    }
    if (!read_numbers(tuple, extents, count))
        return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (extents[i] < 0) {
            PyErr_Format(PyExc_ValueError, "an extent of %lld", (long long)extents[i]);
            return -1;
        }
    return (int)count;
}

static int64_t multiply_extents(const int64_t *extents, int dimensions)
{
    int64_t product = 1;
    for (int axis = 0; axis < dimensions; axis++)
        product *= extents[axis];
    return product;
}

/* -- functions ----------------------------------------------------------------------------------- */

static PyObject *build_moments(int64_t count, const struct moments *m)
{
    const double numbers[] = {m->maximum, m->minimum, m->total, m->squares};
    const int64_t counts[] = {m->nans, m->positive_infinities, m->negative_infinities,
                              m->positives, m->negatives, m->zeros};
    PyObject *tuple = PyTuple_New(11);
    if (!tuple)
        return NULL;
    /* If an item could not be created, it is NULL and an error is set, which the function reports at
       its end. */
    PyTuple_SetItem(tuple, 0, PyLong_FromLongLong(count));
    for (int i = 0; i < 4; i++)
        PyTuple_SetItem(tuple, 1 + i, PyFloat_FromDouble(numbers[i]));
    for (int i = 0; i < 6; i++)
        PyTuple_SetItem(tuple, 5 + i, PyLong_FromLongLong(counts[i]));
    if (!PyErr_Occurred())
        return tuple;
    Py_DECREF(tuple);
    return NULL;
}

static int run_measure(PyObject *const *arguments, int64_t *count, struct moments *found)
{
    const unsigned char *elements;
    int code;
    if (!read_elements(arguments[0], arguments[1], arguments[2], &elements, count, &code))
        return 0;
    const long parts = PyLong_AsLong(arguments[3]);
    if (PyErr_Occurred())
        return 0;
    RUN_KERNEL(*count * element_bytes[code],
               chosen->measure(elements, *count, code, (int)parts, found))
    return 1;
}

static PyObject *measure_elements(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    int64_t count;
    struct moments found;
    (void)self;
    if (!check_count(given, 4) || !run_measure(arguments, &count, &found))
        return NULL;
    return build_moments(count, &found);
}

static PyObject *pack_moments(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    struct {
        int64_t count;
        struct moments found;
    } packed;
    (void)self;
    if (!check_count(given, 4) || !run_measure(arguments, &packed.count, &packed.found))
        return NULL;
    return PyBytes_FromStringAndSize((const char *)&packed, (Py_ssize_t)sizeof packed);
}

static void widen_elements(uint32_t *restrict target, const word16 *restrict source, int64_t count)
{
    word32 *wide = (word32 *)target;
    for (int64_t i = 0; i < count; i++)
        wide[i] = (uint32_t)source[i] << 16;
}

static PyObject *widen_bfloat16(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    (void)self;
    if (!check_count(given, 3))
        return NULL;
    uint32_t *target = PyLong_AsVoidPtr(arguments[0]);
    const word16 *source = PyLong_AsVoidPtr(arguments[1]);
    const int64_t count = PyLong_AsLongLong(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    RUN_KERNEL(count * 2, widen_elements(target, source, count))
    return Py_NewRef(Py_None);
}

static PyObject *fingerprint_shard(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    (void)self;
    if (!check_count(given, 5))
        return NULL;
    struct shard shard;
    struct fingerprint found;
    const unsigned char *elements = PyLong_AsVoidPtr(arguments[0]);
    const long code = PyLong_AsLong(arguments[1]);
    shard.first = PyLong_AsUnsignedLongLong(arguments[4]);
    if (PyErr_Occurred())
        return NULL;
    if (code < 0 || code >= ELEMENT_CODES)
        return PyErr_Format(PyExc_ValueError, "code %ld is not allowed", code);
    shard.dimensions = read_extents(arguments[2], shard.extents);
    if (shard.dimensions < 0
        || !read_numbers(arguments[3], (int64_t *)shard.strides, shard.dimensions))
        return NULL;
    const int64_t count = multiply_extents(shard.extents, shard.dimensions);
    RUN_KERNEL(count * element_bytes[code],
               chosen->fingerprint(elements, &shard, (int)code, &found))
    PyObject *sketch = PyBytes_FromStringAndSize((const char *)found.sketch, sizeof found.sketch);
    return Py_BuildValue("KNN", (unsigned long long)found.digest, sketch,
                         build_moments(count, &found.moments));
}

static PyObject *copy_strided(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    (void)self;
    if (!check_count(given, 6))
        return NULL;
    struct strided_copy plan;
    unsigned char *target = PyLong_AsVoidPtr(arguments[0]);
    const unsigned char *source = PyLong_AsVoidPtr(arguments[1]);
    plan.item_bytes = PyLong_AsLongLong(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    plan.dimensions = read_extents(arguments[3], plan.extents);
    if (plan.dimensions < 0 || !read_numbers(arguments[4], plan.target_strides, plan.dimensions)
        || !read_numbers(arguments[5], plan.source_strides, plan.dimensions))
        return NULL;
    RUN_KERNEL(multiply_extents(plan.extents, plan.dimensions) * plan.item_bytes,
               chosen->copy(target, source, &plan))
    return Py_NewRef(Py_None);
}

static PyObject *stream_memory(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    (void)self;
    if (!check_count(given, 3))
        return NULL;
    unsigned char *target = PyLong_AsVoidPtr(arguments[0]);
    const unsigned char *source = PyLong_AsVoidPtr(arguments[1]);
    const int64_t bytes = PyLong_AsLongLong(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    if (bytes < 0)
        return PyErr_Format(PyExc_ValueError, "%lld bytes are not allowed", (long long)bytes);
    RUN_RELEASED(bytes >= RELEASED_COPY_BYTES, chosen->stream(target, source, bytes))
    return Py_NewRef(Py_None);
}

static PyObject *read_memory(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    (void)self;
    if (!check_count(given, 2))
        return NULL;
    const char *address = PyLong_AsVoidPtr(arguments[0]);
    const Py_ssize_t bytes = PyLong_AsSsize_t(arguments[1]);
    if (PyErr_Occurred())
        return NULL;
    if (bytes < 0)
        return PyErr_Format(PyExc_ValueError, "%zd bytes are not allowed", bytes);
    return PyBytes_FromStringAndSize(address, bytes);
}

/* Sets the strides of elements in C order, and returns their bytes; -1 if there are too many. */
static int64_t pack_strides(struct strided_copy *plan)
{
    int64_t bytes = plan->item_bytes;
    for (int axis = plan->dimensions - 1; axis >= 0; axis--) {
        plan->target_strides[axis] = bytes;
        if (__builtin_mul_overflow(bytes, plan->extents[axis], &bytes))
            return -1;
    }
    return bytes;
}

static PyObject *read_strided(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    (void)self;
    if (!check_count(given, 4))
        return NULL;
    struct strided_copy plan;
    const unsigned char *source = PyLong_AsVoidPtr(arguments[0]);
    plan.item_bytes = PyLong_AsLongLong(arguments[1]);
    if (PyErr_Occurred())
        return NULL;
    plan.dimensions = read_extents(arguments[2], plan.extents);
    if (plan.dimensions < 0 || !read_numbers(arguments[3], plan.source_strides, plan.dimensions))
        return NULL;
    for (int axis = 0; axis < plan.dimensions; axis++)
        plan.source_strides[axis] *= plan.item_bytes;
    const int64_t bytes = pack_strides(&plan);
    if (bytes < 0 || plan.item_bytes < 1)
        return PyErr_Format(PyExc_ValueError, "elements of %lld bytes in this shape are not allowed",
                            (long long)plan.item_bytes);
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (made)
        chosen->copy((unsigned char *)PyBytes_AsString(made), source, &plan);
    return made;
}

static PyObject *encode_varint(PyObject *self, PyObject *number)
{
    (void)self;
    unsigned long long rest = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    char bytes[10];
    int count = 0;
    for (; rest > 127; rest >>= 7)
        bytes[count++] = (char)(rest | 128);
    bytes[count++] = (char)rest;
    return PyBytes_FromStringAndSize(bytes, count);
}

/* The texts that a `struct small_file` points to. */
struct small_file_texts {
    PyObject *mark, *name;
};

static void read_small_file(PyObject *given, struct small_file *file, struct small_file_texts *texts)
{
    char *data;
    Py_ssize_t bytes;
    file->error = EILSEQ;
    if (PyTuple_Size(given) == 3 && PyUnicode_FSConverter(PyTuple_GetItem(given, 0), &texts->mark)
        && PyUnicode_FSConverter(PyTuple_GetItem(given, 1), &texts->name)
        && !PyBytes_AsStringAndSize(PyTuple_GetItem(given, 2), &data, &bytes)) {
        file->mark = PyBytes_AsString(texts->mark);
        file->name = PyBytes_AsString(texts->name);
        file->data = data;
        file->bytes = (size_t)bytes;
        file->error = 0;
    }
    PyErr_Clear(); /* The caller determines the reason, and writes the other files. */
}

static PyObject *describe_small_file(const struct small_file *file)
{
    if (file->error)
        return PyLong_FromLong(file->error);
    const struct timespec *changed = &file->found.st_mtim;
    return Py_BuildValue("KLL", (unsigned long long)file->found.st_ino,
                         (long long)file->found.st_size,
                         changed->tv_sec * 1000000000LL + changed->tv_nsec);
}

static PyObject *write_all_files(int folder, mode_t mode, PyObject *given, Py_ssize_t count)
{
    struct small_file *files = PyMem_Calloc((size_t)count, sizeof *files);
    struct small_file_texts *texts = PyMem_Calloc((size_t)count, sizeof *texts);
    PyObject *made = files && texts ? PyList_New(count) : PyErr_NoMemory();
    if (made) {
        for (Py_ssize_t at = 0; at < count; at++)
            read_small_file(PyList_GetItem(given, at), &files[at], &texts[at]);
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < count; at++)
            if (!files[at].error)
                make_small_file(folder, mode, &files[at]);
        Py_END_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < count; at++) {
            PyObject *described = describe_small_file(&files[at]);
            if (!described || PyList_SetItem(made, at, described)) {
                Py_CLEAR(made);
                break;
            }
        }
    }
    for (Py_ssize_t at = 0; texts && at < count; at++) {
        Py_XDECREF(texts[at].mark);
        Py_XDECREF(texts[at].name);
    }
    PyMem_Free(texts);
    PyMem_Free(files);
    return made;
}

static PyObject *write_small_files(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    (void)self;
    if (!check_count(given, 3))
        return NULL;
    const int folder = (int)PyLong_AsLong(arguments[0]);
    const mode_t mode = (mode_t)PyLong_AsLong(arguments[1]);
    /* The list is copied, so that no other thread can replace its items. */
    PyObject *files = PyErr_Occurred() ? NULL : PySequence_List(arguments[2]);
    if (!files)
        return NULL;
    PyObject *made = write_all_files(folder, mode, files, PyList_Size(files));
    Py_DECREF(files);
    return made;
}

static PyObject *select_variant(PyObject *self, PyObject *name)
{
    (void)self;
    PyObject *encoded = PyUnicode_AsASCIIString(name);
    if (!encoded)
        return NULL;
    int found = -1;
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (!strcmp(variants[i].name, PyBytes_AsString(encoded)) && can_run(i))
            found = i;
    Py_DECREF(encoded);
    if (found < 0)
        return Py_NewRef(Py_False);
    chosen = &variants[found];
    return Py_NewRef(Py_True);
}

static PyObject *get_variant(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return PyUnicode_FromString(chosen->name);
}

/* -- module -------------------------------------------------------------------------------------- */

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

static const char measure_elements_doc[] =
    "measure_elements(data, count, code, parts)\n--\n\n"
    "Return moments of elements at an address, or in a bytes object.";
static const char pack_moments_doc[] =
    "pack_moments(data, count, code, parts)\n--\n\n"
    "Return the moments that measure_elements returns, packed.";
static const char widen_bfloat16_doc[] =
    "widen_bfloat16(target, source, count)\n--\n\nStore bfloat16 elements as float32.";
static const char fingerprint_shard_doc[] =
    "fingerprint_shard(address, code, extents, strides, first)\n--\n\n"
    "Return digest, sketch and moments of a shard.";
static const char copy_strided_doc[] =
    "copy_strided(target, source, item_bytes, extents, target_strides, source_strides)\n--\n\n"
    "Copy elements between axes in two orders.";
static const char stream_memory_doc[] =
    "stream_memory(target, source, byte_count)\n--\n\nCopy bytes past the caches.";
static const char read_memory_doc[] =
    "read_memory(address, byte_count)\n--\n\nReturn a copy of a few bytes.";
static const char read_strided_doc[] =
    "read_strided(address, item_bytes, extents, steps)\n--\n\n"
    "Return a copy of a few elements, C order; steps are in elements.";
static const char write_small_files_doc[] =
    "write_small_files(folder, mode, files)\n--\n\n"
    "Make files, each of a mark, a name and bytes, in an open folder; return inode, size and "
    "time of change in ns of each, or the number of an error.";

static PyMethodDef functions[] = {
    FAST(measure_elements),
    FAST(pack_moments),
    FAST(widen_bfloat16),
    FAST(fingerprint_shard),
    FAST(copy_strided),
    FAST(stream_memory),
    FAST(read_memory),
    FAST(read_strided),
    FAST(write_small_files),
    {"encode_varint", encode_varint, METH_O, "Return the varint of a number of 64 bits."},
    {"select_variant", select_variant, METH_O, "Return whether a variant runs here; use it then."},
    {"get_variant", get_variant, METH_NOARGS, "Return the name of the variant in use."},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module)
{
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (can_run(i))
            chosen = &variants[i];
    return PyModule_AddStringConstant(module, "SOURCE_DIGEST", SOURCE_DIGEST);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Kernels for this processor.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
