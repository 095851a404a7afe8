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

enum { MAX_GPUS = 16, MAX_MIG = 8, MAX_PROCESSES = 64 }; /* nvml_standin.py knows them too */
enum { SLOTS = MAX_GPUS * (1 + MAX_MIG) };
enum { ANY_DEVICE = SLOTS }; /* where calls that name no device are counted */

/* nvml_standin.py reads this list: a function's number is its place in it. */
#define FUNCTIONS \
    X(nvmlInitWithFlags) \
    X(nvmlShutdown) \
    X(nvmlSystemGetDriverVersion) \
    X(nvmlDeviceGetCount_v2) \
    X(nvmlDeviceGetHandleByIndex_v2) \
    X(nvmlDeviceGetMigDeviceHandleByIndex) \
    X(nvmlDeviceGetMigMode) \
    X(nvmlDeviceGetMaxMigDeviceCount) \
    X(nvmlDeviceGetUUID) \
    X(nvmlDeviceGetName) \
    X(nvmlDeviceGetPciInfo_v3) \
    X(nvmlDeviceGetMemoryInfo) \
    X(nvmlDeviceGetMemoryInfo_v2) \
    X(nvmlDeviceGetUtilizationRates) \
    X(nvmlDeviceGetTemperature) \
    X(nvmlDeviceGetPowerUsage) \
    X(nvmlDeviceGetEnforcedPowerLimit) \
    X(nvmlDeviceGetComputeRunningProcesses_v2) \
    X(nvmlDeviceGetComputeRunningProcesses_v3) \
    X(nvmlDeviceGetGraphicsRunningProcesses_v2) \
    X(nvmlDeviceGetGraphicsRunningProcesses_v3)

#define X(name) F_##name,
enum { FUNCTIONS NUM_FUNCTIONS };
#undef X

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    ARGUMENT_VERSION_MISMATCH = 25,
};

/* --- the control file */

struct process {
    uint32_t pid, gpu_instance, compute_instance, unused;
    uint64_t used_bytes; /* all ones: not available */
};

struct device {
    char uuid[96], name[96], pci_id[32];
    uint64_t total_bytes, free_bytes, reserved_bytes;
    uint32_t utilization_percent, temperature_celsius, power_milliwatts, power_limit_milliwatts;
    uint32_t present, mig_enabled, num_compute, num_graphics;
    int32_t errors[NUM_FUNCTIONS];
    uint32_t latency_us[NUM_FUNCTIONS];
    struct process compute[MAX_PROCESSES], graphics[MAX_PROCESSES];
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

/* --- what every call begins with */

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

/* A call that names no device. */
static int enter(int function)
{
    int32_t error;
    if (!initialized())
        return UNINITIALIZED;
    atomic_fetch_add(&file->counts[ANY_DEVICE].calls[function], 1);
    READ(error, file->control.errors[function]);
    return error;
}

/* A call about the device in a slot. */
static int enter_slot(int function, int slot)
{
    int32_t error;
    if (!initialized())
        return UNINITIALIZED;
    atomic_fetch_add(&file->counts[slot].calls[function], 1);
    wait_as_told(&file->devices[slot].latency_us[function]);
    READ(error, file->control.errors[function]);
    if (error == SUCCESS)
        READ(error, file->devices[slot].errors[function]);
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

/* A call about the device of a handle: copies what is told of it into `device`. */
static int enter_handle(int function, void *handle, struct device **device)
{
    static _Thread_local struct device copied;
    if (!initialized())
        return UNINITIALIZED;
    int slot = slot_of(handle);
    if (slot < 0)
        return INVALID_ARGUMENT;
    int error = enter_slot(function, slot);
    READ(copied, file->devices[slot]);
    *device = &copied;
    return error != SUCCESS ? error : copied.present ? SUCCESS : NOT_FOUND;
}

#define ENTER(name) \
    struct device *device; \
    int error = enter_handle(F_##name, handle, &device); \
    if (error != SUCCESS) \
        return error

/* --- the library and the driver */

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
    return result == ARGUMENT_VERSION_MISMATCH ? "Argument version mismatch" : "an error of the stand-in";
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    struct control control;
    int error = enter(F_nvmlSystemGetDriverVersion);
    if (error != SUCCESS)
        return error;
    READ(control, file->control);
    snprintf(version, length, "%s", control.driver_version);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    int error = enter(F_nvmlDeviceGetCount_v2);
    if (error == SUCCESS)
        READ(*count, file->control.num_gpus);
    return error;
}

/* --- devices */

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle)
{
    uint32_t num_gpus;
    if (!initialized())
        return UNINITIALIZED;
    READ(num_gpus, file->control.num_gpus);
    if (index >= num_gpus)
        return INVALID_ARGUMENT;
    int slot = (int)index * (1 + MAX_MIG);
    int error = enter_slot(F_nvmlDeviceGetHandleByIndex_v2, slot);
    if (error == SUCCESS)
        *handle = handle_of(slot);
    return error;
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending)
{
    ENTER(nvmlDeviceGetMigMode);
    *current = *pending = device->mig_enabled;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned int *count)
{
    ENTER(nvmlDeviceGetMaxMigDeviceCount);
    *count = device->mig_enabled ? MAX_MIG : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned int index, void **instance)
{
    ENTER(nvmlDeviceGetMigDeviceHandleByIndex);
    if (!device->mig_enabled || index >= MAX_MIG)
        return INVALID_ARGUMENT;
    int slot = slot_of(handle) + 1 + (int)index;
    uint32_t present;
    READ(present, file->devices[slot].present);
    if (!present)
        return NOT_FOUND;
    *instance = handle_of(slot);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned int length)
{
    ENTER(nvmlDeviceGetUUID);
    snprintf(uuid, length, "%s", device->uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned int length)
{
    ENTER(nvmlDeviceGetName);
    snprintf(name, length, "%s", device->name);
    return SUCCESS;
}

struct pci_info {
    char bus_id_legacy[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *pci)
{
    ENTER(nvmlDeviceGetPciInfo_v3);
    memset(pci, 0, sizeof *pci);
    memcpy(pci->bus_id, device->pci_id, sizeof pci->bus_id);
    sscanf(device->pci_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    return SUCCESS;
}

struct memory_v1 {
    unsigned long long total, free, used;
};

int nvmlDeviceGetMemoryInfo(void *handle, struct memory_v1 *memory)
{
    ENTER(nvmlDeviceGetMemoryInfo);
    memory->total = device->total_bytes;
    memory->free = device->free_bytes;
    memory->used = memory->total - memory->free;
    return SUCCESS;
}

struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    ENTER(nvmlDeviceGetMemoryInfo_v2);
    if (memory->version != (sizeof *memory | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    memory->total = device->total_bytes;
    memory->reserved = device->reserved_bytes;
    memory->free = device->free_bytes;
    memory->used = memory->total - memory->free - memory->reserved;
    return SUCCESS;
}

/* --- load and processes */

struct utilization {
    unsigned int gpu, memory;
};

int nvmlDeviceGetUtilizationRates(void *handle, struct utilization *utilization)
{
    ENTER(nvmlDeviceGetUtilizationRates);
    utilization->gpu = device->utilization_percent;
    utilization->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, unsigned int sensor, unsigned int *celsius)
{
    ENTER(nvmlDeviceGetTemperature);
    if (sensor != 0)
        return INVALID_ARGUMENT;
    *celsius = device->temperature_celsius;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned int *milliwatts)
{
    ENTER(nvmlDeviceGetPowerUsage);
    *milliwatts = device->power_milliwatts;
    return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned int *milliwatts)
{
    ENTER(nvmlDeviceGetEnforcedPowerLimit);
    *milliwatts = device->power_limit_milliwatts;
    return SUCCESS;
}

struct process_info { /* nvmlProcessInfo_v2_t; the calls _v2 and _v3 both fill it */
    unsigned int pid;
    unsigned long long used_bytes;
    unsigned int gpu_instance, compute_instance;
};

static int list(const struct process *processes, unsigned int num, unsigned int *count, struct process_info *infos)
{
    unsigned int room = *count;
    *count = num;
    if (room < num)
        return INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < num; i++) {
        infos[i] = (struct process_info){processes[i].pid, processes[i].used_bytes, processes[i].gpu_instance,
                                         processes[i].compute_instance};
    }
    return SUCCESS;
}

#define LIST(name, kind) \
    int name(void *handle, unsigned int *count, struct process_info *infos) \
    { \
        ENTER(name); \
        return list(device->kind, device->num_##kind, count, infos); \
    }

LIST(nvmlDeviceGetComputeRunningProcesses_v2, compute)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, compute)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, graphics)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, graphics)
