/* A stand-in for libnvidia-ml.so.1: answers the calls that pagetide makes from a control file.
 *
 * nvml_standin.py compiles this, writes the file and documents what can be told. The file is mapped, so that a change
 * shows in the next call, and a call costs well under a microsecond besides the latency it was told to have:
 *
 *     struct control     written by Python      sequence (odd while it writes), the driver, its errors
 *     struct device[]    written by Python      one for each GPU, and one for each MIG instance of it
 *     struct counts[]    written by this file   how often each function was called
 *
 * Structures, codes and names are those of NVIDIA's nvml.h. Which file it is, the environment says at nvmlInit.
 */

#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_GPUS = 16, MAX_MIG = 8, ANSWER_MAX = 64 * 24 }; /* nvml_standin.py knows them too */
enum { SLOTS = MAX_GPUS * (1 + MAX_MIG) };
enum { ANY_DEVICE = SLOTS }; /* where calls that name no device are counted */

/* nvml_standin.py reads this list: a function's number is its place in it. */
#define FUNCTIONS \
    X(nvmlInitWithFlags) X(nvmlShutdown) X(nvmlSystemGetDriverVersion) X(nvmlDeviceGetCount_v2) \
    X(nvmlDeviceGetHandleByIndex_v2) X(nvmlDeviceGetMigDeviceHandleByIndex) X(nvmlDeviceGetMigMode) \
    X(nvmlDeviceGetMaxMigDeviceCount) X(nvmlDeviceGetUUID) X(nvmlDeviceGetName) X(nvmlDeviceGetPciInfo_v3) \
    X(nvmlDeviceGetMemoryInfo) X(nvmlDeviceGetMemoryInfo_v2) X(nvmlDeviceGetUtilizationRates) \
    X(nvmlDeviceGetTemperature) X(nvmlDeviceGetPowerUsage) X(nvmlDeviceGetEnforcedPowerLimit) \
    X(nvmlDeviceGetComputeRunningProcesses_v2) X(nvmlDeviceGetComputeRunningProcesses_v3) \
    X(nvmlDeviceGetGraphicsRunningProcesses_v2) X(nvmlDeviceGetGraphicsRunningProcesses_v3) \
    X(nvmlDeviceGetProcessUtilization)

#define X(name) F_##name,
enum { FUNCTIONS NUM_FUNCTIONS };
#undef X

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };

struct answer { /* of one function about one device: what Python made of pynvml's types */
    int32_t error;
    uint32_t latency_us, num_bytes, unused;
    unsigned char bytes[ANSWER_MAX];
};

struct device {
    uint32_t present, mig_enabled;
    struct answer answers[NUM_FUNCTIONS];
};

struct control {
    _Atomic uint64_t sequence;
    uint32_t loaded, generation, num_gpus, unused; /* generation: how often the driver was loaded */
    char driver_version[80];
    int32_t errors[NUM_FUNCTIONS];
};

struct counts {
    _Atomic uint64_t calls[NUM_FUNCTIONS];
};

struct file {
    struct control control;
    struct device devices[SLOTS]; /* GPU g at g * (1 + MAX_MIG), its instances behind it */
    struct counts counts[SLOTS + 1];
};

_Static_assert(sizeof(struct control) == CONTROL_BYTES, "nvml_standin.py has another struct control");
_Static_assert(sizeof(struct device) == DEVICE_BYTES, "nvml_standin.py has another struct device");
_Static_assert(sizeof(struct file) == FILE_BYTES, "nvml_standin.py has another struct file");

static struct file *file;
static char file_path[4096];
static _Atomic uint32_t users;     /* nvmlInit less nvmlShutdown */
static _Atomic uint32_t attached;  /* the generation that nvmlInit found */

static void map_file(void)
{
    const char *path = getenv("NVML_STANDIN_CONTROL");
    if (path == NULL || (file != NULL && strcmp(path, file_path) == 0))
        return;
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0)
        return;
    void *mapped = mmap(NULL, sizeof(struct file), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (mapped == MAP_FAILED)
        return;
    snprintf(file_path, sizeof file_path, "%s", path);
    file = mapped; /* the one before stays mapped: another thread may still be in it */
    users = 0;
}

/* Copy what Python wrote, all of one moment. Python is never long in between; if it was killed there, go on. */
static void copy(void *to, const void *from, size_t size)
{
    for (int attempt = 0; attempt < 100000; attempt++) {
        uint64_t before = atomic_load(&file->control.sequence);
        memcpy(to, from, size);
        atomic_thread_fence(memory_order_acquire);
        if (before % 2 == 0 && atomic_load(&file->control.sequence) == before)
            return;
    }
}

#define READ(to, field) copy(&(to), &(field), sizeof(to))

/* As long as the control file says, in slices: it may be told to end sooner while this waits. */
static void wait_as_told(const uint32_t *latency_us)
{
    uint32_t told;
    READ(told, *latency_us);
    for (uint32_t waited = 0, slice; waited < told; waited += slice) {
        slice = told - waited < 2000 ? told - waited : 2000;
        struct timespec pause = {0, (long)slice * 1000};
        nanosleep(&pause, NULL);
        if (told > 2000)
            READ(told, *latency_us);
    }
}

static int initialized(void)
{
    struct control control;
    if (file == NULL || users == 0)
        return 0;
    READ(control, file->control);
    return control.loaded && control.generation == attached;
}

/* A call about the device in a slot, or about none. */
static int enter(int function, int slot)
{
    int32_t error;
    if (!initialized())
        return UNINITIALIZED;
    atomic_fetch_add(&file->counts[slot].calls[function], 1);
    if (slot != ANY_DEVICE)
        wait_as_told(&file->devices[slot].answers[function].latency_us);
    READ(error, file->control.errors[function]);
    if (error == SUCCESS && slot != ANY_DEVICE)
        READ(error, file->devices[slot].answers[function].error);
    return initialized() ? error : UNINITIALIZED;
}

/* A handle is its slot and the generation of the driver that gave it: handles die with their driver. */
static void *handle_of(int slot)
{
    return (void *)(((uintptr_t)attached << 16) | (uintptr_t)(slot + 1));
}

static int slot_of(void *handle)
{
    uintptr_t value = (uintptr_t)handle;
    int slot = (int)(value & 0xffff) - 1;
    return (value >> 16) == attached && slot >= 0 && slot < SLOTS ? slot : -1;
}

/* A call about the device of a handle: copies what is told of it into `told`. */
static int enter_handle(int function, void *handle, struct answer *told)
{
    uint32_t present;
    if (!initialized())
        return UNINITIALIZED;
    int slot = slot_of(handle);
    if (slot < 0)
        return INVALID_ARGUMENT;
    int error = enter(function, slot);
    READ(*told, file->devices[slot].answers[function]);
    READ(present, file->devices[slot].present);
    return error != SUCCESS ? error : present ? SUCCESS : NOT_FOUND;
}

#define ENTER(name) \
    struct answer told; \
    int error = enter_handle(F_##name, handle, &told); \
    if (error != SUCCESS) \
        return error

int nvmlInitWithFlags(unsigned int flags)
{
    struct control control;
    (void)flags;
    map_file();
    if (file == NULL)
        return DRIVER_NOT_LOADED;
    atomic_fetch_add(&file->counts[ANY_DEVICE].calls[F_nvmlInitWithFlags], 1);
    READ(control, file->control);
    if (control.errors[F_nvmlInitWithFlags] != SUCCESS)
        return control.errors[F_nvmlInitWithFlags];
    if (!control.loaded)
        return DRIVER_NOT_LOADED;
    if (users == 0)
        attached = control.generation;
    atomic_fetch_add(&users, 1);
    return SUCCESS;
}

int nvmlShutdown(void)
{
    if (file == NULL || users == 0)
        return UNINITIALIZED;
    atomic_fetch_add(&file->counts[ANY_DEVICE].calls[F_nvmlShutdown], 1);
    atomic_fetch_sub(&users, 1);
    return SUCCESS;
}

const char *nvmlErrorString(int result)
{
    (void)result;
    return "an error of the stand-in";
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    struct control control;
    int error = enter(F_nvmlSystemGetDriverVersion, ANY_DEVICE);
    if (error != SUCCESS)
        return error;
    READ(control, file->control);
    snprintf(version, length, "%s", control.driver_version);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    int error = enter(F_nvmlDeviceGetCount_v2, ANY_DEVICE);
    if (error == SUCCESS)
        READ(*count, file->control.num_gpus);
    return error;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle)
{
    uint32_t num_gpus;
    if (!initialized())
        return UNINITIALIZED;
    READ(num_gpus, file->control.num_gpus);
    if (index >= num_gpus)
        return INVALID_ARGUMENT;
    int slot = (int)index * (1 + MAX_MIG);
    int error = enter(F_nvmlDeviceGetHandleByIndex_v2, slot);
    if (error == SUCCESS)
        *handle = handle_of(slot);
    return error;
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending)
{
    ENTER(nvmlDeviceGetMigMode);
    memcpy(current, told.bytes, sizeof *current);
    *pending = *current;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned int index, void **instance)
{
    ENTER(nvmlDeviceGetMigDeviceHandleByIndex);
    int slot = slot_of(handle);
    uint32_t present, mig_enabled;
    READ(mig_enabled, file->devices[slot].mig_enabled);
    if (!mig_enabled || index >= MAX_MIG)
        return INVALID_ARGUMENT;
    slot += 1 + (int)index;
    READ(present, file->devices[slot].present);
    if (!present)
        return NOT_FOUND;
    *instance = handle_of(slot);
    return SUCCESS;
}

/* A number, a structure, or a text that is shorter than the room its caller has. */
#define GIVES(name) \
    int name(void *handle, void *room) \
    { \
        ENTER(name); \
        memcpy(room, told.bytes, told.num_bytes); \
        return SUCCESS; \
    }

GIVES(nvmlDeviceGetUUID) GIVES(nvmlDeviceGetName) GIVES(nvmlDeviceGetPciInfo_v3) GIVES(nvmlDeviceGetMaxMigDeviceCount)
GIVES(nvmlDeviceGetPowerUsage) GIVES(nvmlDeviceGetEnforcedPowerLimit) GIVES(nvmlDeviceGetUtilizationRates)
GIVES(nvmlDeviceGetMemoryInfo) GIVES(nvmlDeviceGetMemoryInfo_v2)

int nvmlDeviceGetTemperature(void *handle, unsigned int sensor, unsigned int *celsius)
{
    ENTER(nvmlDeviceGetTemperature);
    if (sensor != 0)
        return INVALID_ARGUMENT;
    memcpy(celsius, told.bytes, sizeof *celsius);
    return SUCCESS;
}

#define LISTS(name) \
    int name(void *handle, unsigned int *count, void *infos) \
    { \
        ENTER(name); \
        unsigned int room = *count; \
        *count = told.num_bytes / 24; \
        if (room < *count) \
            return INSUFFICIENT_SIZE; \
        memcpy(infos, told.bytes, told.num_bytes); \
        return SUCCESS; \
    }

LISTS(nvmlDeviceGetComputeRunningProcesses_v2) LISTS(nvmlDeviceGetComputeRunningProcesses_v3)
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v2) LISTS(nvmlDeviceGetGraphicsRunningProcesses_v3)

/* Samples newer than the time stamp: their second field. */
int nvmlDeviceGetProcessUtilization(void *handle, void *samples, unsigned int *count, unsigned long long since)
{
    struct sample {
        unsigned int pid;
        unsigned long time_stamp;
        unsigned int load[4];
    };
    ENTER(nvmlDeviceGetProcessUtilization);
    unsigned int room = *count, all = told.num_bytes / sizeof(struct sample);
    const struct sample *from = (const void *)told.bytes;
    *count = 0;
    for (unsigned int i = 0; i < all; i++)
        if (from[i].time_stamp > since) {
            if (*count < room)
                ((struct sample *)samples)[*count] = from[i];
            ++*count;
        }
    return *count == 0 ? NOT_FOUND : room < *count ? INSUFFICIENT_SIZE : SUCCESS;
}
