//go:build nfs

// Package pause stops a process at a chosen system call of SQLite, so that a test can kill it or cut its network there.
// It never changes what the call does.
package pause

/*
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef void (*call)(void);
typedef struct vfs vfs;
struct vfs { // SQLite's sqlite3_vfs; only set and get are called
	int version, file_size, path_size; vfs *next; const char *name; void *data;
	call open, delete, access, path, dl_open, dl_error, dl_sym, dl_close, random, sleep, time, error, time64;
	int (*set)(vfs *, const char *, call);
	call (*get)(vfs *, const char *);
	call after;
};
extern vfs *sqlite3_vfs_find(const char *);

static char stop_at, file[4096]; // stop_at is the first letter of the Point at which the process stops while the file exists
static int stop_page, pages_written; // stop_page says at which page write of a commit the process stops; pages_written counts the pages written since the last write to the journal

static void halt(void) {
	if (access(file, F_OK)) return;
	(void)!write(1, "paused\n", 7);
	while (!access(file, F_OK)) usleep(20000);
	(void)!write(1, "resumed\n", 8);
}

static int is(const char *path, const char *name) {
	size_t n = strlen(path), m = strlen(name);
	return n >= m && !strcmp(path + n - m, name);
}

static void halt_at_write(int fd, off_t at, char first) {
	char link[32], path[4096];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, path, sizeof path - 1);
	path[n < 0 ? 0 : n] = 0;
	if (is(path, "/study.db")) {
		if (++pages_written == stop_page && stop_at == 'p') halt();
	} else if (is(path, "/study.db-journal")) {
		if (at == 0 && !first && stop_at == (pages_written ? 'c' : 'j')) halt(); // only an invalid journal begins with a zero byte; a valid one begins with a magic number
		pages_written = 0;
	}
}

static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static int (*real_truncate)(int, off_t);
static int (*real_unlink)(const char *);

static ssize_t my_pwrite(int fd, const void *b, size_t n, off_t at) { halt_at_write(fd, at, n ? *(const char *)b : 0); return real_pwrite(fd, b, n, at); }
static int my_truncate(int fd, off_t n) { if (n == 0) halt_at_write(fd, 0, 0); return real_truncate(fd, n); }
static int my_unlink(const char *path) {
	if (is(path, "/study.db-journal")) {
		if (stop_at == 'c') halt();
		pages_written = 0;
	}
	return real_unlink(path);
}

static int hook(const char *where, int page, const char *as_long) {
	vfs *v = sqlite3_vfs_find(0);
	if (!v || v->version < 3) return 1;
	stop_at = where[0], stop_page = page;
	snprintf(file, sizeof file, "%s", as_long);
	real_pwrite = (void *)v->get(v, "pwrite");
	real_truncate = (void *)v->get(v, "ftruncate");
	real_unlink = (void *)v->get(v, "unlink");
	return !real_pwrite || v->set(v, "pwrite", (call)my_pwrite) || v->set(v, "ftruncate", (call)my_truncate) || v->set(v, "unlink", (call)my_unlink);
}
*/
import "C"

import "errors"

// A Point is a moment in a commit to a database called study.db.
type Point string

// The points.
const (
	Journal Point = "journal" // before the first write of the old pages into the journal
	Page    Point = "page"    // between two writes of the new pages into the database
	Commit  Point = "commit"  // before the write that invalidates the journal and so makes the commit
)

// StopAt makes this process stop at a point of each commit, as long as the file exists. At the point Page, the process
// stops before a write of a page. The number page says before which write: 1 is the first one of the commit.
func StopAt(p Point, page int, file string) error {
	if C.hook(C.CString(string(p)), C.int(page), C.CString(file)) != 0 {
		return errors.New("SQLite's system calls cannot be replaced")
	}
	return nil
}
