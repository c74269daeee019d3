/* What the probe does in a counted step, of which only the end is recorded.
 *
 * The same is written in Python, in counting.py, guard.py and hooks/loops; this only replaces it where a C compiler was there
 * when zerotop was installed. In a real loop the processor's caches hold nothing of the probe when a hook is called, and the
 * way to Python's code and objects takes 5 to 25 us for each hook; that to this code takes less than one.
 *
 * Everything here runs with Python's lock held. Whatever is unusual is left to the Python code (`otherwise`, `finish`).
 * Only the limited API of CPython 3.9 is used, so that one binary serves all later versions.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

static PyObject *method_type;  /* types.MethodType */
static PyObject *own_folder;  /* of the probe's code, as a str that ends with a slash */
static PyObject *name_self, *name_training, *name_call_impl, *name_finished_steps, *name_last_step, *name_position;

static inline int64_t read_clock(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* --- the state that all hooks share: see StepCounting in counting.py ------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    char is_on, was_on;
    char writes_records;  /* whether the end of a step may be written here */
    PyObject *loop, *recorder, *files, *take_slot, *owner, *end_run;
    long long backwards, seen_backwards, optimizer, updates, update_ns, update_backwards, depth, cost_ns, begin_ns;
    long long first_step, uncounted_step, table_end, last_slot, engine, flags;
    double shortest_ns, longest_ns;
    char *memory;  /* of the ring; `owner` keeps it mapped */
    long long memory_bytes, slots, slot_bytes, slots_at, table_index, phase;
} Counting;

typedef struct {
    int64_t begin_ns, end_ns, tokens;
    int32_t step, micro_step, rows, sequence;
    uint16_t phase, flags;
    uint8_t depth, engine;
    uint16_t pad;
} SpanRecord;

static int counting_traverse(Counting *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->loop);
    Py_VISIT(self->recorder);
    Py_VISIT(self->files);
    Py_VISIT(self->take_slot);
    Py_VISIT(self->owner);
    Py_VISIT(self->end_run);
    return 0;
}

static int counting_clear(Counting *self) {
    self->is_on = self->writes_records = 0;
    self->memory = NULL;
    Py_CLEAR(self->loop);
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->files);
    Py_CLEAR(self->take_slot);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->end_run);
    return 0;
}

static void free_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void counting_dealloc(Counting *self) {
    PyObject_GC_UnTrack(self);
    counting_clear(self);
    free_object((PyObject *)self);
}

static int counting_init(Counting *self, PyObject *args, PyObject *kwargs) {
    if (PyTuple_Size(args) || (kwargs && PyDict_Size(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "StepCounting takes no arguments");
        return -1;
    }
    Py_INCREF(Py_None);
    self->loop = Py_None;
    return 0;
}

static PyObject *counting_stop(Counting *self, PyObject *unused) {
    PyObject *loop = self->loop;
    self->is_on = 0;
    Py_INCREF(Py_None);
    self->loop = Py_None;
    Py_XDECREF(loop);
    Py_RETURN_NONE;
}

/* use_ring(owner, address, (bytes, slots, slot bytes, first slot at, table's index, phase, flags), files, recorder, end_run) */
static PyObject *counting_use_ring(Counting *self, PyObject *args) {
    PyObject *owner, *files, *take_slot, *recorder, *end_run, *old;
    unsigned long long address;
    long long bytes, slots, slot_bytes, slots_at, index, phase, flags;
    if (!PyArg_ParseTuple(args, "OK(LLLLLLL)OOOO", &owner, &address, &bytes, &slots, &slot_bytes, &slots_at, &index, &phase,
                          &flags, &files, &take_slot, &recorder, &end_run))
        return NULL;
    if (!address || slots <= 0 || slot_bytes < (long long)(sizeof(SpanRecord) + sizeof(uint64_t)) || slot_bytes % 8 ||
        slots_at % 8 || slots_at + slots * slot_bytes > bytes) {
        PyErr_SetString(PyExc_ValueError, "such a ring cannot be written here");
        return NULL;
    }
    self->writes_records = 0;
#define REPLACE(field, value) (old = self->field, Py_INCREF(value), self->field = value, Py_XDECREF(old))
    REPLACE(owner, owner);
    REPLACE(files, files);
    REPLACE(take_slot, take_slot);
    REPLACE(recorder, recorder);
    REPLACE(end_run, end_run);
#undef REPLACE
    self->memory = (char *)(uintptr_t)address;
    self->memory_bytes = bytes, self->slots = slots, self->slot_bytes = slot_bytes, self->slots_at = slots_at;
    self->table_index = index, self->phase = phase, self->flags = flags;
    Py_RETURN_NONE;
}

/* leave_ring(): the memory may be unmapped now */
static PyObject *counting_leave_ring(Counting *self, PyObject *unused) {
    self->writes_records = 0;
    self->memory = NULL;
    Py_CLEAR(self->owner);
    Py_CLEAR(self->files);
    Py_CLEAR(self->take_slot);
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->end_run);
    Py_RETURN_NONE;
}

#define FIELD(name, type) {#name, type, offsetof(Counting, name), 0, NULL}
static PyMemberDef counting_members[] = {
    FIELD(is_on, T_BOOL), FIELD(was_on, T_BOOL), FIELD(writes_records, T_BOOL), FIELD(loop, T_OBJECT),
    FIELD(backwards, T_LONGLONG), FIELD(seen_backwards, T_LONGLONG), FIELD(optimizer, T_LONGLONG),
    FIELD(updates, T_LONGLONG), FIELD(update_ns, T_LONGLONG), FIELD(update_backwards, T_LONGLONG),
    FIELD(depth, T_LONGLONG), FIELD(cost_ns, T_LONGLONG), FIELD(begin_ns, T_LONGLONG), FIELD(first_step, T_LONGLONG),
    FIELD(uncounted_step, T_LONGLONG), FIELD(table_end, T_LONGLONG), FIELD(last_slot, T_LONGLONG),
    FIELD(engine, T_LONGLONG), FIELD(shortest_ns, T_DOUBLE), FIELD(longest_ns, T_DOUBLE), {NULL}};

static PyMethodDef counting_methods[] = {
    {"stop", (PyCFunction)counting_stop, METH_NOARGS, "Leave out no more phases from now on: something unusual happens."},
    {"use_ring", (PyCFunction)counting_use_ring, METH_VARARGS, "Write the ends of counted steps into this ring."},
    {"leave_ring", (PyCFunction)counting_leave_ring, METH_NOARGS, "Write nothing any more."},
    {NULL}};

static PyType_Slot counting_slots[] = {
    {Py_tp_doc, "What the hooks of one process need to know in a counted step."},
    {Py_tp_init, counting_init}, {Py_tp_dealloc, counting_dealloc}, {Py_tp_traverse, counting_traverse},
    {Py_tp_clear, counting_clear}, {Py_tp_members, counting_members}, {Py_tp_methods, counting_methods}, {0, NULL}};

static PyType_Spec counting_spec = {"zerotop_probe.inside.native._counted_steps.StepCounting", sizeof(Counting), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, counting_slots};

static PyObject *counting_type;

/* --- hooks ----------------------------------------------------------------------------------------------------------- */

/* All kinds of hooks; each uses some of the fields. */
typedef struct {
    PyObject_HEAD
    Counting *counting;
    PyObject *original;      /* what is called in a counted step */
    PyObject *otherwise;     /* what is called in any other */
    PyObject *note_failure;  /* called as note_failure(subject, args, kwargs) where the original raised in a counted step */
    PyObject *module_class;  /* torch.nn.Module */
    long long module;        /* id() of the module whose forwards these are */
    char counts_backwards;
    PyObject *attributes;
} Hook;

static int hook_traverse(Hook *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->counting);
    Py_VISIT(self->original);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->note_failure);
    Py_VISIT(self->module_class);
    Py_VISIT(self->attributes);
    return 0;
}

static int hook_clear(Hook *self) {
    Py_CLEAR(self->original);
    Py_CLEAR(self->note_failure);
    Py_CLEAR(self->module_class);
    Py_CLEAR(self->attributes);
    return 0;
}

static void hook_dealloc(Hook *self) {
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    Py_CLEAR(self->counting);
    Py_CLEAR(self->otherwise);
    free_object((PyObject *)self);
}

/* Hook(counting, otherwise, original=None, note_failure=None, module=0, module_class=None) */
static int hook_init(Hook *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"counting", "otherwise", "original", "note_failure", "module", "module_class", NULL};
    PyObject *counting, *otherwise, *original = Py_None, *note_failure = Py_None, *module_class = Py_None;
    long long module = 0;
    if (self->counting != NULL) {
        PyErr_SetString(PyExc_TypeError, "a hook is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OOLO", names, &counting, &otherwise, &original, &note_failure, &module,
                                     &module_class))
        return -1;
    if (!PyObject_TypeCheck(counting, (PyTypeObject *)counting_type)) {
        PyErr_SetString(PyExc_TypeError, "counting must be a StepCounting of this module");
        return -1;
    }
    if (self->attributes == NULL && (self->attributes = PyDict_New()) == NULL) return -1;
    Py_INCREF(counting), Py_INCREF(otherwise), Py_INCREF(original), Py_INCREF(note_failure), Py_INCREF(module_class);
    self->counting = (Counting *)counting, self->otherwise = otherwise, self->original = original;
    self->note_failure = note_failure, self->module = module, self->module_class = module_class;
    return 0;
}

static int is_ready(Hook *self) {
    if (self->counting != NULL) return 1;
    PyErr_SetString(PyExc_RuntimeError, "this hook was not initialised");
    return 0;
}

/* Whether this entry of a traceback is of the probe's code. */
static int is_own_entry(PyObject *entry) {
    PyObject *frame = PyObject_GetAttrString(entry, "tb_frame");
    PyObject *code = frame != NULL ? PyObject_GetAttrString(frame, "f_code") : NULL;
    PyObject *file = code != NULL ? PyObject_GetAttrString(code, "co_filename") : NULL;
    int is_own = file != NULL && own_folder != NULL && PyUnicode_Tailmatch(file, own_folder, 0, PY_SSIZE_T_MAX, -1) == 1;
    Py_XDECREF(file);
    Py_XDECREF(code);
    Py_XDECREF(frame);
    PyErr_Clear();
    return is_own;
}

/* Remove the probe's frames from the start of the current exception's traceback. Only the caller of a Python function can
 * always remove its frame: an exception may arrive before the function's first instruction. */
static void hide_frames(void) {
    PyObject *type, *value, *traceback, *next;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    while (traceback != NULL && traceback != Py_None && is_own_entry(traceback)) {
        next = PyObject_GetAttrString(traceback, "tb_next");
        Py_DECREF(traceback);
        traceback = next;
    }
    PyErr_Clear();
    if (traceback == Py_None) Py_CLEAR(traceback);
    if (value != NULL) PyException_SetTraceback(value, traceback != NULL ? traceback : Py_None);
    PyErr_Restore(type, value, traceback);
}

/* Leave the call to Python. */
static PyObject *call_otherwise(Hook *self, PyObject *args, PyObject *kwargs) {
    PyObject *result = PyObject_Call(self->otherwise, args, kwargs);
    if (result == NULL) hide_frames();
    return result;
}

static PyObject *prepend(PyObject *first, PyObject *args) {
    Py_ssize_t count = PyTuple_Size(args);
    PyObject *all = PyTuple_New(count + 1);
    if (all == NULL) return NULL;
    Py_INCREF(first);
    PyTuple_SetItem(all, 0, first);
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *argument = PyTuple_GetItem(args, index);
        Py_INCREF(argument);
        PyTuple_SetItem(all, index + 1, argument);
    }
    return all;
}

/* Whether checkpointing has computed enough of a forward again: how it ends that, see guard.is_usual_end(). */
static int ends_recomputation(PyObject *type) {
    PyObject *name = type != NULL ? PyObject_GetAttrString(type, "__name__") : NULL;
    int is_equal = name != NULL && PyUnicode_CompareWithASCIIString(name, "_StopRecomputationError") == 0;
    Py_XDECREF(name);
    PyErr_Clear();
    return is_equal;
}

/* Tell Python that the original raised. The exception stays set, unless note_failure() raises one of the job, as from a signal
 * handler: then it is the context of that one, as where Python handles one exception while another arrives. */
static void report_failure(Hook *self, PyObject *subject, PyObject *args, PyObject *kwargs) {
    PyObject *type, *value, *traceback, *result, *empty = NULL;
    if (PyErr_ExceptionMatches(PyExc_StopIteration)) return; /* the end of an iterator is how a loop is left */
    PyErr_Fetch(&type, &value, &traceback);
    if (ends_recomputation(type)) {
        PyErr_Restore(type, value, traceback);
        return;
    }
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) PyException_SetTraceback(value, traceback);
    if (kwargs == NULL) kwargs = empty = PyDict_New();
    result = kwargs != NULL ? PyObject_CallFunctionObjArgs(self->note_failure, subject, args, kwargs, NULL) : NULL;
    Py_XDECREF(empty);
    if (result != NULL) {
        Py_DECREF(result);
        PyErr_Restore(type, value, traceback);
        return;
    }
    hide_frames();
    PyObject *new_type, *new_value, *new_traceback;
    PyErr_Fetch(&new_type, &new_value, &new_traceback);
    PyErr_NormalizeException(&new_type, &new_value, &new_traceback);
    if (new_value != NULL && new_value != value) {
        Py_XINCREF(value);
        PyException_SetContext(new_value, value); /* takes the reference */
    }
    PyErr_Restore(new_type, new_value, new_traceback);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

/* A function or method of the job, called as always in a counted step. */
static PyObject *call_counted(Hook *self, PyObject *args, PyObject *kwargs) {
    if (!is_ready(self)) return NULL;
    Counting *counting = self->counting;
    if (!counting->is_on) return call_otherwise(self, args, kwargs);
    char counts_backwards = self->counts_backwards;
    PyObject *result = PyObject_Call(self->original, args, kwargs);
    if (result != NULL) {
        counting->backwards += counts_backwards;
    } else if (PyTuple_Size(args) > 0) {
        PyObject *rest = PyTuple_GetSlice(args, 1, PyTuple_Size(args));
        if (rest != NULL) report_failure(self, PyTuple_GetItem(args, 0), rest, kwargs);
        Py_XDECREF(rest);
    }
    return result;
}

static PyObject *bind_counted(PyObject *self, PyObject *object, PyObject *type) {
    if (object == NULL || object == Py_None) {
        Py_INCREF(self);
        return self;
    }
    return PyObject_CallFunctionObjArgs(method_type, self, object, NULL);
}

/* Return a new reference to the module whose call this is if it is the one of this hook and trains, else NULL. There is an
 * error only if code of the job has raised it, as a signal handler that ran in a property of the module. */
static PyObject *find_training_module(Hook *self) {
    PyObject *locals = PyEval_GetLocals(); /* of Module._wrapped_call_impl(), borrowed */
    PyObject *module = locals != NULL ? PyObject_GetItem(locals, name_self) : NULL;
    PyObject *training = NULL;
    if (module != NULL && (long long)(intptr_t)module == self->module) training = PyObject_GetAttr(module, name_training);
    if (training != Py_True) Py_CLEAR(module);
    Py_XDECREF(training);
    if (module == NULL && PyErr_Occurred() &&
        (PyErr_ExceptionMatches(PyExc_AttributeError) || PyErr_ExceptionMatches(PyExc_KeyError)))
        PyErr_Clear();
    return module;
}

/* The forward of a root: stands in module._compiled_call_impl, see hooks/loops/root_finder.py. */
static PyObject *call_forward(Hook *self, PyObject *args, PyObject *kwargs) {
    if (!is_ready(self)) return NULL;
    Counting *counting = self->counting;
    PyObject *module = NULL, *function, *all, *result;
    if (counting->is_on) {
        int64_t begin_ns = read_clock();
        module = find_training_module(self);
        counting->cost_ns += read_clock() - begin_ns;
        if (module == NULL && PyErr_Occurred()) return NULL;
    }
    if (module == NULL) {
        all = prepend((PyObject *)self, args);
        result = all != NULL ? call_otherwise(self, all, kwargs) : NULL;
        Py_XDECREF(all);
        return result;
    }
    if (self->original != Py_None) {
        result = PyObject_Call(self->original, args, kwargs);
    } else {
        function = PyObject_GetAttr(self->module_class, name_call_impl);
        all = function != NULL ? prepend(module, args) : NULL;
        result = all != NULL ? PyObject_Call(function, all, kwargs) : NULL;
        Py_XDECREF(all);
        Py_XDECREF(function);
    }
    if (result == NULL) report_failure(self, module, args, kwargs);
    Py_DECREF(module);
    return result;
}

/* Whether a step of an optimizer was given nothing, or None for its closure, as wrappers of optimizers do. */
static int is_plain_step(PyObject *given, PyObject *named) {
    if (!PyTuple_Check(given) || !PyDict_Check(named)) return 0;
    Py_ssize_t count = PyTuple_Size(given), names = PyDict_Size(named);
    if (names == 0) return count == 1 || (count == 2 && PyTuple_GetItem(given, 1) == Py_None);
    return count == 1 && names == 1 && PyDict_GetItemString(named, "closure") == Py_None;
}

/* Called as hook(optimizer, args, kwargs) before each step of an optimizer. */
static PyObject *call_before(Hook *self, PyObject *args, PyObject *kwargs) {
    if (!is_ready(self)) return NULL;
    Counting *counting = self->counting;
    if (counting->loop != Py_None && !counting->update_ns && PyTuple_Size(args) == 3) {
        if (counting->optimizer == (long long)(intptr_t)PyTuple_GetItem(args, 0) &&
            is_plain_step(PyTuple_GetItem(args, 1), PyTuple_GetItem(args, 2))) {
            counting->update_backwards = counting->backwards;
            counting->update_ns = read_clock();
            Py_RETURN_NONE;
        }
    }
    return call_otherwise(self, args, kwargs);
}

/* Return the step that ends now, after which the loop has one more; -1 without error if it must be left to Python. */
static long long advance_step(Counting *counting) {
    PyObject *value = PyObject_GetAttr(counting->loop, name_finished_steps), *next = NULL;
    long long step = value != NULL ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    if (step >= 0 && step < INT32_MAX) next = PyLong_FromLongLong(step + 1);
    if (next == NULL || PyObject_SetAttr(counting->loop, name_finished_steps, next) < 0) step = -1;
    Py_XDECREF(next);
    PyErr_Clear();
    return step;
}

static int write_step(Counting *counting, int64_t begin_ns, int64_t time_ns, long long step) {
    PyObject *number = PyObject_CallFunctionObjArgs(counting->take_slot, NULL);
    long long slot = number != NULL ? PyLong_AsLongLong(number) : -1;
    if (slot < 0 || PyObject_SetAttr(counting->files, name_position, number) < 0) {
        PyErr_Clear();
        Py_XDECREF(number);
        return 0;
    }
    Py_DECREF(number);
    counting->last_slot = slot;
    char *place = counting->memory + counting->slots_at + slot % counting->slots * counting->slot_bytes;
    long long payload = counting->slot_bytes - (long long)sizeof(uint64_t);
    SpanRecord record = {begin_ns, time_ns, -1, (int32_t)step, -1, -1, -1, (uint16_t)counting->phase,
                         (uint16_t)counting->flags, 0, (uint8_t)counting->engine, 0};
    memcpy(place, &record, sizeof record);
    memset(place + sizeof record, 0, payload - sizeof record);
    /* Whoever drains the ring takes the slot for whole once it has its tag. */
    __atomic_store_n((uint64_t *)(place + payload), (uint64_t)(slot + 1) << 8 | (uint64_t)counting->table_index,
                     __ATOMIC_RELEASE);
    return 1;
}

/* Called as hook(optimizer, args, kwargs) after each step of an optimizer. */
static PyObject *call_after(Hook *self, PyObject *args, PyObject *kwargs) {
    if (!is_ready(self)) return NULL;
    Counting *counting = self->counting;
    if (!counting->writes_records || counting->memory == NULL || !counting->update_ns || counting->depth ||
        counting->loop == Py_None || counting->loop == NULL || counting->backwards == counting->seen_backwards ||
        counting->last_slot >= counting->table_end || PyTuple_Size(args) != 3 ||
        counting->optimizer != (long long)(intptr_t)PyTuple_GetItem(args, 0))
        return call_otherwise(self, args, kwargs);
    int64_t time_ns = read_clock(), begin_ns = counting->update_ns;
    long long step = advance_step(counting);
    if (step < 0 || !write_step(counting, begin_ns, time_ns, step)) {
        counting->writes_records = 0;
        if (step < 0) return call_otherwise(self, args, kwargs);
        counting->is_on = 0; /* the end of this step is missing, as where there is no room for it */
    }
    counting->update_ns = 0;
    counting->seen_backwards = counting->backwards;
    counting->updates++;
    PyObject *number = PyLong_FromLongLong(step);
    if (number == NULL || PyObject_SetAttr(counting->recorder, name_last_step, number) < 0) PyErr_Clear();
    Py_XDECREF(number);
    int64_t duration_ns = time_ns - counting->begin_ns;
    counting->begin_ns = time_ns;
    PyObject *result = NULL;
    if (step + 1 == counting->uncounted_step || (double)duration_ns < counting->shortest_ns ||
        (double)duration_ns > counting->longest_ns || !counting->is_on) {
        PyObject *end_run = counting->end_run;
        Py_INCREF(end_run);
        result = PyObject_CallFunction(end_run, "LLLLLL", begin_ns, time_ns, step, counting->engine, counting->flags,
                                       duration_ns);
        Py_DECREF(end_run);
        if (result == NULL) hide_frames();
    } else {
        Py_INCREF(Py_None);
        result = Py_None;
    }
    counting->cost_ns += read_clock() - time_ns;
    return result;
}

static PyMemberDef hook_members[] = {
    {"counts_backwards", T_BOOL, offsetof(Hook, counts_backwards), 0, "Whether each call is one of backward()."},
    {"__dictoffset__", T_PYSSIZET, offsetof(Hook, attributes), READONLY, NULL},
    {"__dict__", T_OBJECT, offsetof(Hook, attributes), READONLY, NULL},
    {NULL}};

#define HOOK_TYPE(name, title, text, flags, ...)                                                                        \
    static PyType_Slot name##_slots[] = {{Py_tp_doc, text}, {Py_tp_init, hook_init}, {Py_tp_dealloc, hook_dealloc},      \
                                         {Py_tp_traverse, hook_traverse}, {Py_tp_clear, hook_clear},                     \
                                         {Py_tp_members, hook_members}, __VA_ARGS__, {0, NULL}};                         \
    static PyType_Spec name##_spec = {"zerotop_probe.inside.native._counted_steps." title, sizeof(Hook), 0,              \
                                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | flags, name##_slots};

HOOK_TYPE(call, "CountedCall", "A function or method that is called as always in counted steps.",
          Py_TPFLAGS_METHOD_DESCRIPTOR, {Py_tp_call, call_counted}, {Py_tp_descr_get, bind_counted})
HOOK_TYPE(forward, "CountedForward", "The call of a module that is called as always in counted steps.", Py_TPFLAGS_BASETYPE,
          {Py_tp_call, call_forward})
HOOK_TYPE(before, "BeforeUpdate", "Notes the begin of an update in a counted step.", 0, {Py_tp_call, call_before})
HOOK_TYPE(after, "AfterUpdate", "Records the end of a counted step.", 0, {Py_tp_call, call_after})

/* --- garbage collections ---------------------------------------------------------------------------------------------- */

/* A member of gc.callbacks that times collections. It is in C because Python only prints what is raised in such a callback: an
 * exception that a signal handler of the job raises, which is run as soon as a function in Python begins, would be lost. */
typedef struct {
    PyObject_HEAD
    long long generation, since_ns, begin_ns, spent_ns, collections;
} CollectionTimer;

static PyObject *time_collection(CollectionTimer *self, PyObject *args, PyObject *kwargs) {
    PyObject *phase = PyTuple_Size(args) == 2 ? PyTuple_GetItem(args, 0) : NULL;
    PyObject *info = phase != NULL ? PyTuple_GetItem(args, 1) : NULL;
    PyObject *number = info != NULL && PyDict_Check(info) ? PyDict_GetItemString(info, "generation") : NULL;
    if (number != NULL && PyLong_Check(number) && PyUnicode_Check(phase) && PyLong_AsLongLong(number) >= self->generation) {
        if (PyUnicode_CompareWithASCIIString(phase, "start") == 0) {
            self->since_ns = read_clock();
        } else if (self->since_ns) {
            self->begin_ns = self->begin_ns ? self->begin_ns : self->since_ns;
            self->spent_ns += read_clock() - self->since_ns;
            self->collections++;
            self->since_ns = 0;
        }
    }
    PyErr_Clear();
    Py_RETURN_NONE;
}

static void timer_dealloc(PyObject *self) { free_object(self); }

static PyMemberDef timer_members[] = {
    {"generation", T_LONGLONG, offsetof(CollectionTimer, generation), 0, "The youngest generation that counts."},
    {"begin_ns", T_LONGLONG, offsetof(CollectionTimer, begin_ns), 0, "Begin of the first collection."},
    {"spent_ns", T_LONGLONG, offsetof(CollectionTimer, spent_ns), 0, "The time of all."},
    {"collections", T_LONGLONG, offsetof(CollectionTimer, collections), 0, "Their number."},
    {NULL}};
static PyType_Slot timer_slots[] = {{Py_tp_doc, "Times garbage collections, as a member of gc.callbacks."},
                                    {Py_tp_call, time_collection}, {Py_tp_members, timer_members},
                                    {Py_tp_dealloc, timer_dealloc}, {0, NULL}};
static PyType_Spec timer_spec = {"zerotop_probe.inside.native._counted_steps.CollectionTimer", sizeof(CollectionTimer), 0,
                                 Py_TPFLAGS_DEFAULT, timer_slots};

/* --- module ---------------------------------------------------------------------------------------------------------- */

static PyObject *hide_frames_of(PyObject *module, PyObject *folder) {
    PyObject *old = own_folder;
    if (!PyUnicode_Check(folder)) {
        PyErr_SetString(PyExc_TypeError, "the folder must be a str");
        return NULL;
    }
    Py_INCREF(folder);
    own_folder = folder;
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"hide_frames_of", hide_frames_of, METH_O, "Remove frames of code in this folder from the start of tracebacks."}, {NULL}};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_counted_steps",
                                               "The probe's work in counted steps.", -1, module_methods};

static PyObject *add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL) return NULL;
    Py_INCREF(type);
    if (PyModule_AddObject(module, name, type) < 0) {
        Py_DECREF(type);
        Py_CLEAR(type);
    }
    return type;
}

PyMODINIT_FUNC PyInit__counted_steps(void) {
    PyObject *module = PyModule_Create(&module_definition), *types = PyImport_ImportModule("types");
    method_type = types != NULL ? PyObject_GetAttrString(types, "MethodType") : NULL;
    Py_XDECREF(types);
    name_self = PyUnicode_InternFromString("self");
    name_training = PyUnicode_InternFromString("training");
    name_call_impl = PyUnicode_InternFromString("_call_impl");
    name_finished_steps = PyUnicode_InternFromString("finished_steps");
    name_last_step = PyUnicode_InternFromString("last_step");
    name_position = PyUnicode_InternFromString("position");
    if (module == NULL || method_type == NULL || name_position == NULL ||
        (counting_type = add_type(module, "StepCounting", &counting_spec)) == NULL ||
        add_type(module, "CountedCall", &call_spec) == NULL || add_type(module, "CountedForward", &forward_spec) == NULL ||
        add_type(module, "BeforeUpdate", &before_spec) == NULL || add_type(module, "AfterUpdate", &after_spec) == NULL ||
        add_type(module, "CollectionTimer", &timer_spec) == NULL ||
        PyModule_AddIntConstant(module, "SPAN_BYTES", sizeof(SpanRecord)) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
