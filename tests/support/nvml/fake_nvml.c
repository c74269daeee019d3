/* A libnvidia-ml.so.1 that plays back answers, for GPUs that fail at will. $PLAYED_NVML names a file of lines:

   gpus 2                             how many there are
   pid 0 1234 5678                    a process on GPU 0, and its bytes: 1 GiB where they are left out
   0.NAME VALUE                       a value of GPU 0; 0.field.3 is a field value, 0.link.17 the state of a link
   event 0 8 79                       an event of GPU 0: its type and data. Each line is delivered once
   operational 0 GPU-RAS 23 2 40 1 7 48  an operational event of GPU 0: its module, code, category, severity, attributes,
                                      group and Xid, which is 0 without one
   form preview                       nvmlEventSetWait_v3 as NVIDIA's preview had it, with the timeout as an argument
   hang nvmlDeviceGetNvLinkState 0    that call on GPU 0 does not return while the line is there; "-" as GPU: on any
   fail nvmlDeviceRegisterEvents - 3  that call returns this code
*/
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *Device;
typedef struct { unsigned fieldId, scopeId; long long timestamp, latency; unsigned type; int result; unsigned long long value; } Field;
typedef struct { Device device; unsigned long long type, data; unsigned gpuInstance, computeInstance; } Event;
typedef struct { unsigned pid; unsigned long long used; unsigned gpuInstance, computeInstance; } Process;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_LOST = 15 };

static char *read_script(char *text, size_t size) {
    const char *path = getenv("PLAYED_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t length = file ? fread(text, 1, size - 1, file) : 0;
    if (file) fclose(file);
    text[length] = 0;
    return text;
}

static int find_line(const char *key, char *rest, size_t size) {
    char text[8192], *state, *line;
    size_t length = strlen(key);
    for (line = strtok_r(read_script(text, sizeof text), "\n", &state); line; line = strtok_r(NULL, "\n", &state))
        if (!strncmp(line, key, length) && (line[length] == ' ' || !line[length])) {
            snprintf(rest, size, "%s", line[length] ? line + length + 1 : "");
            return 1;
        }
    return 0;
}

static unsigned long long find_value(int gpu, const char *name, unsigned long long otherwise) {
    char key[80], rest[80];
    snprintf(key, sizeof key, "%d.%s", gpu, name);
    return find_line(key, rest, sizeof rest) ? strtoull(rest, NULL, 10) : otherwise;
}

static int enter(const char *name, int gpu) {
    char key[120], rest[80];
    for (int either = 0; either < 2; either++) {
        char which[12] = "-";
        if (either) snprintf(which, sizeof which, "%d", gpu);
        snprintf(key, sizeof key, "hang %s %s", name, which);
        while (find_line(key, rest, sizeof rest)) usleep(20000);
        snprintf(key, sizeof key, "fail %s %s", name, which);
        if (find_line(key, rest, sizeof rest)) return atoi(rest);
    }
    return gpu >= 0 && find_value(gpu, "lost", 0) ? GPU_LOST : SUCCESS;
}

static int index_of(Device device) { return (int)(size_t)device - 1; }

#define BEGIN(name, gpu) { int code = enter(name, gpu); if (code) return code; }
#define NUMBER(name, key, otherwise) \
    int name(Device device, unsigned *value) { \
        BEGIN(#name, index_of(device)) \
        *value = (unsigned)find_value(index_of(device), key, otherwise); \
        return SUCCESS; \
    }

const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : code == GPU_LOST ? "GPU is lost" : "error"; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; BEGIN("nvmlInitWithFlags", -1) return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.played"); return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    char rest[80];
    BEGIN("nvmlDeviceGetCount_v2", -1)
    *count = find_line("gpus", rest, sizeof rest) ? (unsigned)atoi(rest) : 1;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    BEGIN("nvmlDeviceGetHandleByIndex_v2", -1)
    *device = (Device)(size_t)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device device, char *text, unsigned size) { snprintf(text, size, "GPU-played-%d", index_of(device)); return SUCCESS; }
int nvmlDeviceGetName(Device device, char *text, unsigned size) { (void)device; snprintf(text, size, "Played H100"); return SUCCESS; }

int nvmlDeviceGetMemoryInfo(Device device, unsigned long long *sizes) {
    char text[8192], *state, *line;
    unsigned long long size;
    int gpu, pid;
    BEGIN("nvmlDeviceGetMemoryInfo", index_of(device))
    sizes[0] = 80ull << 30, sizes[2] = 2ull << 30;
    for (line = strtok_r(read_script(text, sizeof text), "\n", &state); line; line = strtok_r(NULL, "\n", &state))
        if (sscanf(line, "pid %d %d %llu", &gpu, &pid, &size) == 3 && gpu == index_of(device)) sizes[2] += size;
    sizes[1] = sizes[0] - sizes[2];
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device device, unsigned *now, unsigned *pending) {
    int mode = (int)find_value(index_of(device), "mig", 2);
    BEGIN("nvmlDeviceGetMigMode", index_of(device))
    if (mode == 2) return NOT_SUPPORTED;
    *now = *pending = (unsigned)mode;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned *count) { (void)device; *count = 2; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned slot, Device *part) { *part = (Device)((size_t)device * 100 + slot); return SUCCESS; }

int nvmlDeviceGetUtilizationRates(Device device, unsigned *rates) {
    BEGIN("nvmlDeviceGetUtilizationRates", index_of(device))
    rates[0] = (unsigned)find_value(index_of(device), "utilization", 90), rates[1] = 20;
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(Device device, int count, Field *fields) {
    BEGIN("nvmlDeviceGetFieldValues", index_of(device))
    for (int place = 0; place < count; place++) {
        char key[40];
        if (fields[place].scopeId) snprintf(key, sizeof key, "field.%u.%u", fields[place].fieldId, fields[place].scopeId);
        else snprintf(key, sizeof key, "field.%u", fields[place].fieldId);
        fields[place].value = find_value(index_of(device), key, ~0ull);
        fields[place].result = fields[place].value == ~0ull ? NOT_SUPPORTED : SUCCESS;
        fields[place].type = 3;
    }
    return SUCCESS;
}

NUMBER(nvmlDeviceGetPowerUsage, "power", 300000)

int nvmlDeviceGetTemperature(Device device, unsigned kind, unsigned *value) { (void)device, (void)kind; *value = 50; return SUCCESS; }
int nvmlDeviceGetClockInfo(Device device, unsigned kind, unsigned *value) { (void)device, (void)kind; *value = 1980; return SUCCESS; }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *value) { *value = find_value(index_of(device), "reasons", 0); return SUCCESS; }

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *found) {
    char text[8192], *state, *line;
    unsigned room = *count;
    unsigned long long size;
    int gpu, pid, read;
    BEGIN("nvmlDeviceGetComputeRunningProcesses_v3", index_of(device))
    *count = 0;
    for (line = strtok_r(read_script(text, sizeof text), "\n", &state); line; line = strtok_r(NULL, "\n", &state))
        if ((read = sscanf(line, "pid %d %d %llu", &gpu, &pid, &size)) >= 2 && gpu == index_of(device)) {
            if (*count < room) found[*count].pid = (unsigned)pid, found[*count].used = read == 3 ? size : 1ull << 30;
            ++*count;
        }
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Device device, unsigned *count, Process *found) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, found);
}

int nvmlDeviceGetProcessUtilization(Device device, void *samples, unsigned *count, unsigned long long since) {
    (void)device, (void)samples, (void)count, (void)since;
    return NOT_FOUND;
}

NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "most_pcie_width", 16)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "most_pcie_generation", 5)

int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *active) {
    char key[40];
    BEGIN("nvmlDeviceGetNvLinkState", index_of(device))
    if (link >= find_value(index_of(device), "links", 18)) return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "link.%u", link);
    *active = (unsigned)find_value(index_of(device), key, 1);
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(Device device, unsigned long long *types) {
    BEGIN("nvmlDeviceGetSupportedEventTypes", index_of(device))
    *types = find_value(index_of(device), "events", 0xFC1F);
    return SUCCESS;
}

int nvmlEventSetCreate(Device *set) { BEGIN("nvmlEventSetCreate", -1) *set = (Device)1; return SUCCESS; }
int nvmlEventSetFree(Device set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(Device device, unsigned long long types, Device set) {
    (void)types, (void)set;
    BEGIN("nvmlDeviceRegisterEvents", index_of(device))
    return SUCCESS;
}

/* GPU Operational Events, by NVIDIA's released header. Of the preview's form only the arguments and the names of the fields
   are known, not their order. */
#define OPERATIONAL_FIELDS \
    unsigned type; \
    char uuid[96], module[16]; \
    unsigned long long eventType, eventData, group, instance, timestamp, trace; \
    unsigned gpuInstance, computeInstance, severity, category, code, scope, originator, moduleInstance, chiplet, level; \
    unsigned attributes, cperSize, groupAttributes; \
    unsigned char groupSize, groupIndex;
typedef struct { unsigned timeout_ms; OPERATIONAL_FIELDS } Released;
typedef struct { OPERATIONAL_FIELDS } Preview;
_Static_assert(sizeof(Released) == 224 && offsetof(Released, eventType) == 120, "as in the released header");

static unsigned operational_xid;

int nvmlEventSetRegisterGpuOperationalEvents_v1(Device set, const char *uuid) {
    (void)set;
    BEGIN("nvmlEventSetRegisterGpuOperationalEvents_v1", -1)
    return strncmp(uuid, "GPU-played-", 11) ? INVALID_ARGUMENT : SUCCESS;
}

static int find_operational(Preview *event, int *gpu) {
    static int delivered;
    char text[8192], *state, *line;
    int place = 0;
    for (line = strtok_r(read_script(text, sizeof text), "\n", &state); line; line = strtok_r(NULL, "\n", &state))
        if (sscanf(line, "operational %d %15s %u %u %u %u %llu %u", gpu, event->module, &event->code, &event->category,
                   &event->severity, &event->attributes, &event->group, &operational_xid) == 8 && place++ == delivered)
            return ++delivered;
    return 0;
}

int nvmlEventSetWait_v3(Device set, void *data, unsigned timeout_ms) {
    char rest[80];
    int is_preview = find_line("form preview", rest, sizeof rest), gpu;
    Released *released = data;
    (void)set;
    if (!is_preview) timeout_ms = released->timeout_ms;
    for (unsigned waited = 0;; waited += 10) {
        Preview event = {.type = 1};
        BEGIN("nvmlEventSetWait_v3", -1)
        if (find_operational(&event, &gpu)) {
            snprintf(event.uuid, sizeof event.uuid, "GPU-played-%d", gpu);
            if (is_preview) {
                *(Preview *)data = event;
                return SUCCESS;
            }
            *released = (Released){.timeout_ms = timeout_ms, .type = 1, .severity = event.severity, .category = event.category,
                                   .code = event.code, .attributes = event.attributes, .group = event.group};
            memcpy(released->uuid, event.uuid, sizeof event.uuid);
            memcpy(released->module, event.module, sizeof event.module);
            return SUCCESS;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        if (!getenv("PLAYED_NVML")) waited = timeout_ms - 10, usleep(1000 * timeout_ms); /* to measure costs */
        usleep(10000);
    }
}

int nvmlEventSetGetContextCount_v1(Device set, unsigned *count) {
    (void)set;
    BEGIN("nvmlEventSetGetContextCount_v1", -1)
    *count = operational_xid ? 2 : 1;
    return SUCCESS;
}

int nvmlEventSetGetContextInfo_v1(Device set, unsigned *context) {
    (void)set;
    BEGIN("nvmlEventSetGetContextInfo_v1", -1)
    context[1] = context[0] == 1; /* the first one is of a type that NVML does not know */
    return SUCCESS;
}

int nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1(Device set, unsigned *context) {
    (void)set;
    BEGIN("nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1", -1)
    context[1] = operational_xid;
    return SUCCESS;
}

int nvmlEventSetWait_v2(Device set, Event *event, unsigned timeout_ms) {
    static int delivered;
    (void)set;
    for (unsigned waited = 0;; waited += 10) {
        char text[8192], *state, *line;
        int place = 0, gpu;
        unsigned long long type, data;
        BEGIN("nvmlEventSetWait_v2", -1)
        for (line = strtok_r(read_script(text, sizeof text), "\n", &state); line; line = strtok_r(NULL, "\n", &state))
            if (sscanf(line, "event %d %llu %llu", &gpu, &type, &data) == 3 && place++ == delivered) {
                memset(event, 0, sizeof *event);
                event->device = (Device)(size_t)(gpu + 1), event->type = type, event->data = data;
                delivered++;
                return SUCCESS;
            }
        if (waited >= timeout_ms) return TIMEOUT;
        if (!getenv("PLAYED_NVML")) waited = timeout_ms - 10, usleep(1000 * timeout_ms); /* to measure costs */
        usleep(10000);
    }
}
