/* A file that is made under a hidden name and renamed when it is complete. */

#ifndef RANKDUMP_SMALL_FILE_H
#define RANKDUMP_SMALL_FILE_H

#include <stddef.h>
#include <sys/stat.h>
#include <sys/types.h>

struct small_file {
    const char *mark, *name; /* it is written as `.MARK.tmp` */
    const char *data;
    size_t bytes;
    struct stat found; /* its status */
    int error; /* the number of the error for which there is no file, or 0 */
};

/* Makes a file in an open folder, or leaves nothing: EEXIST says that the name is taken. A file of
   the hidden name is removed. */
void make_small_file(int folder, mode_t mode, struct small_file *file);

#endif
