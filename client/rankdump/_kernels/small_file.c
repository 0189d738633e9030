/* Writes a small file that is either complete or absent, with one system call after the other. */

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "small_file.h"

/* Value from linux/fs.h, which old headers do not define. */
#define FAIL_IF_TAKEN 1

static int create_hidden(int folder, mode_t mode, const char *name)
{
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    const int made = openat(folder, name, flags, mode);
    if (made >= 0 || errno != EEXIST || unlinkat(folder, name, 0))
        return made;
    return openat(folder, name, flags, mode);
}

static int write_all(int made, const char *data, size_t bytes)
{
    while (bytes) {
        const ssize_t written = write(made, data, bytes);
        if (written < 0 && errno != EINTR)
            return errno;
        if (written > 0) {
            data += written;
            bytes -= (size_t)written;
        }
    }
    return 0;
}

static int rename_without_replacing(int folder, const char *present, const char *name)
{
#ifdef SYS_renameat2
    return syscall(SYS_renameat2, folder, present, folder, name, FAIL_IF_TAKEN) ? errno : 0;
#else
    (void)folder, (void)present, (void)name;
    return ENOSYS;
#endif
}

static int fill_and_close(int made, mode_t mode, struct small_file *file)
{
    int error = write_all(made, file->data, file->bytes);
    if (!error && fstat(made, &file->found))
        error = errno;
    /* The umask of the process or a default ACL of the folder may have changed the mode. */
    if (!error && (file->found.st_mode & 07777) != mode && fchmod(made, mode))
        error = errno;
    if (close(made) && !error && errno != EINTR)
        error = errno;
    return error;
}

void make_small_file(int folder, mode_t mode, struct small_file *file)
{
    char hidden[NAME_MAX + 1];
    if ((size_t)snprintf(hidden, sizeof hidden, ".%s.tmp", file->mark) >= sizeof hidden) {
        file->error = ENAMETOOLONG;
        return;
    }
    const int made = create_hidden(folder, mode, hidden);
    if (made < 0) {
        file->error = errno == EEXIST ? EBUSY : errno; /* EEXIST is reserved for the name */
        return;
    }
    file->error = fill_and_close(made, mode, file);
    if (!file->error)
        file->error = rename_without_replacing(folder, hidden, file->name);
    if (file->error)
        unlinkat(folder, hidden, 0);
}
