/* Moves the wall clock of the processes that preload it, and of nobody else: what a step of the machine's clock does.
 *
 * WALL_CLOCK_FILE names a file of 8 bytes: nanoseconds that are added to the wall clock, and may change at any time.
 * Monotonic clocks and the times of files stay as they are. libfaketime 0.9.10 fails every sleep of Python 3.11.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define SLICE (SECOND / 5) /* a wait looks at the clock so often */

static const volatile int64_t *offset;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_cond_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_sem_timedwait)(sem_t *, const struct timespec *);

__attribute__((constructor)) static void prepare(void) {
    static const int64_t none = 0;
    if (offset) return;
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_cond_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real_cond_timedwait) real_cond_timedwait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    real_sem_timedwait = dlsym(RTLD_NEXT, "sem_timedwait");
    const char *name = getenv("WALL_CLOCK_FILE");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    offset = mapped == MAP_FAILED ? &none : mapped;
    if (file >= 0) close(file);
}

static int64_t to_ns(const struct timespec *time) { return time->tv_sec * SECOND + time->tv_nsec; }

static struct timespec from_ns(int64_t ns) { return (struct timespec){.tv_sec = ns / SECOND, .tv_nsec = ns % SECOND}; }

static int64_t really_now(void) {
    struct timespec now;
    prepare();
    real_gettime(CLOCK_REALTIME, &now);
    return to_ns(&now);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    prepare();
    int result = real_gettime(clock, time);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *time = from_ns(to_ns(time) + *offset);
    return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    (void)zone;
    int64_t now = really_now() + *offset;
    *time = (struct timeval){.tv_sec = now / SECOND, .tv_usec = now % SECOND / 1000};
    return 0;
}

time_t time(time_t *result) {
    time_t now = (really_now() + *offset) / SECOND;
    if (result) *result = now;
    return now;
}

/* Returns when the next slice of a wait ends, by the real clock; 0: the wait is over. */
static int64_t next_slice(int64_t deadline) {
    int64_t now = really_now(), left = deadline - now - *offset;
    return left <= 0 ? 0 : now + (left < SLICE ? left : SLICE);
}

/* By their size: a condition's clock may be the monotonic one, which counts from the machine's start. */
static int is_wall_clock(const struct timespec *deadline) { return deadline->tv_sec > 1000000000; }

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    prepare();
    if (!is_wall_clock(deadline)) return real_cond_timedwait(condition, mutex, deadline);
    int64_t end = next_slice(to_ns(deadline));
    if (!end) end = really_now();
    struct timespec until = from_ns(end);
    int result = real_cond_timedwait(condition, mutex, &until);
    /* Woken for nothing, which a condition may be: a second wait could miss what happened between the two. */
    return result == ETIMEDOUT && next_slice(to_ns(deadline)) ? 0 : result;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    prepare();
    for (;;) {
        int64_t end = next_slice(to_ns(deadline));
        struct timespec until = from_ns(end ? end : really_now());
        int result = real_sem_timedwait(semaphore, &until);
        if (result == 0 || errno != ETIMEDOUT || !next_slice(to_ns(deadline))) return result;
    }
}
