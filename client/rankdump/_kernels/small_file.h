/* A file that is written under a hidden name, and renamed when it is complete. */

#ifndef RANKDUMP_SMALL_FILE_H
#define RANKDUMP_SMALL_FILE_H

#include <stddef.h>
#include <sys/stat.h>
#include <sys/types.h>

struct small_file {
    const char *mark, *name; /* the file is written as `.MARK.tmp` */
    const char *data;
    size_t bytes;
    struct stat found; /* status of the complete file */
    int error; /* number of the error that prevented the file, or 0 */
};

/* Writes a file into an open folder, or leaves nothing: EEXIST says that the name is taken. An
   existing file with the hidden name is removed. */
void make_small_file(int folder, mode_t mode, struct small_file *file);

#endif
