package host

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"strconv"
)

// OOMKills returns how many processes the kernel has ended for lack of memory in our cgroup, and the file that says so; in
// the whole machine where no cgroup tells. at is empty where nothing tells.
func (r Reader) OOMKills() (n int64, at string, err error) {
	if r.Root == nil {
		r.Root = os.DirFS("/")
	}
	groups, err := r.groups()
	for _, g := range groups { // ours before those above it
		name := path.Join(g.dir, "memory.events") // of the group and all below it
		if !g.v2 {
			name = path.Join(g.dir, "memory.oom_control") // of the group alone
		}
		if !g.has("memory") {
			continue
		}
		if n, ok, err := r.oomKills(name); ok || err != nil {
			return n, name, err
		}
	}
	const machine = "/proc/vmstat"
	n, ok, err2 := r.oomKills(machine)
	if !ok {
		return 0, "", errors.Join(err, err2)
	}
	return n, machine, nil
}

// oomKills reads the counter of one file; ok is false where there is none.
func (r Reader) oomKills(file string) (n int64, ok bool, err error) {
	text, err := r.read(file)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	word, ok := value(text, "oom_kill ")
	if !ok {
		return 0, false, nil
	}
	n, err = strconv.ParseInt(word, 10, 64)
	return n, err == nil, err
}
