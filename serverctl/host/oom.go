package host

import (
	"errors"
	"io/fs"
	"os"
	"strconv"

	"vllmtuner/serverctl/cgroup"
)

// OOMKills returns how many processes the kernel has killed for lack of memory, and the file that counts them. It takes
// the first counter that exists: of our own cgroup, of a cgroup above it, or of the whole machine. If there is no
// counter, the file name is empty.
func (r Reader) OOMKills() (n int64, at string, err error) {
	if r.Root == nil {
		r.Root = os.DirFS("/")
	}
	groups, err := cgroup.Groups(r.Root)
	for _, g := range groups {
		if n, at, err := g.OOMKills(); at != "" || err != nil {
			return n, at, err
		}
	}
	const machine = "/proc/vmstat"
	text, err2 := r.read(machine)
	if errors.Is(err2, fs.ErrNotExist) {
		return 0, "", err
	}
	count, ok := value(text, "oom_kill ")
	if ok && err2 == nil {
		n, err2 = strconv.ParseInt(count, 10, 64)
	}
	if !ok || err2 != nil {
		return 0, "", errors.Join(err, err2)
	}
	return n, machine, nil
}
