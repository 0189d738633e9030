/* A small file that is complete or absent: the system calls for it, one after the other. */

#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "small_file.h"

/* Of linux/fs.h, which old headers do not have. */
#define FAIL_IF_TAKEN 1

static int create_hidden(const struct small_file *file)
{
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    const int made = openat(file->folder, file->hidden_name, flags, file->mode);
    if (made >= 0 || errno != EEXIST || unlinkat(file->folder, file->hidden_name, 0))
        return made;
    return openat(file->folder, file->hidden_name, flags, file->mode);
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

static int rename_without_replacing(const struct small_file *file)
{
#ifdef SYS_renameat2
    return syscall(SYS_renameat2, file->folder, file->hidden_name, file->folder, file->name,
                   FAIL_IF_TAKEN) ? errno : 0;
#else
    (void)file;
    return ENOSYS;
#endif
}

int make_small_file(const struct small_file *file, struct stat *found)
{
    const int made = create_hidden(file);
    if (made < 0)
        return errno == EEXIST ? EBUSY : errno; /* EEXIST is kept for the name. */
    int error = write_all(made, file->data, file->bytes);
    if (!error && fstat(made, found))
        error = errno;
    /* The process may mask bits, and a folder may have a default ACL. */
    if (!error && (found->st_mode & 07777) != file->mode && fchmod(made, file->mode))
        error = errno;
    if (close(made) && !error && errno != EINTR)
        error = errno;
    if (!error)
        error = rename_without_replacing(file);
    if (error)
        unlinkat(file->folder, file->hidden_name, 0);
    return error;
}
