/* A file that is made under a hidden name and renamed when it is complete. */

#ifndef RANKDUMP_SMALL_FILE_H
#define RANKDUMP_SMALL_FILE_H

#include <stddef.h>
#include <sys/stat.h>
#include <sys/types.h>

struct small_file {
    int folder; /* descriptor */
    const char *hidden_name, *name;
    mode_t mode;
    const char *data;
    size_t bytes;
};

/* Returns 0 and the status of the file, or the number of an error: then nothing is left, and EEXIST
   says that the name is taken. A file of the hidden name is removed. */
int make_small_file(const struct small_file *file, struct stat *found);

#endif
