package weights

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"vllmtuner/foreign"
)

// ErrUnknown is returned for a model that is not completely on disk. vLLM then downloads the model, or says what is
// wrong.
var ErrUnknown = errors.New("the model's weights are not on disk")

// A Model says which model a server loads, in the words of vLLM's flags.
type Model struct {
	Name     string                   // folder, GGUF file, or name on the Hugging Face hub
	Revision string                   // --revision; empty means main
	CacheDir string                   // --download-dir; empty means the cache folder of the environment
	Env      func(name string) string // the server's environment
}

// A kind is one format of weights, with the index file that lists the model's files.
type kind struct{ pattern, index string }

// kinds lists the formats in the order in which vLLM looks for them. vLLM loads the first format that it finds (load
// format auto of 0.14.1 and 0.32.0, vllm/model_executor/model_loader/default_loader.py). vLLM does not look for GGUF
// files in a folder, but users give such folders as the model.
var kinds = []kind{
	{"consolidated*.safetensors", "consolidated.safetensors.index.json"},
	{"*.safetensors", "model.safetensors.index.json"},
	{"*.bin", ""},
	{"*.pt", ""},
	{"*.gguf", ""},
}

// notWeights are the endings of files that look like weights but belong to a training run
// (filter_files_not_needed_for_inference in vLLM's weight_utils.py, 0.14.1).
var notWeights = []string{"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}

// Files returns the sorted list of files from which vLLM reads the model's weights, and their folder. If the model is
// not on disk, the error wraps ErrUnknown. If the folder lacks a file that its index names, the error does not wrap
// ErrUnknown, because no server can start from such a folder.
func Files(m Model) (files []File, where string, err error) {
	info, err := os.Stat(m.Name)
	switch {
	case err == nil && info.IsDir():
		files, missing, err := weightFiles(m.Name)
		if err == nil && missing != "" {
			err = errors.New(missing)
		}
		return files, m.Name, err
	case err == nil:
		return []File{{m.Name, info.Size()}}, filepath.Dir(m.Name), nil
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrInvalid):
		return nil, "", fmt.Errorf("find the model: %w", err)
	case m.Name == "" || filepath.IsAbs(m.Name) || strings.HasPrefix(m.Name, ".") || strings.HasPrefix(m.Name, "~"):
		return nil, "", fmt.Errorf("%w: there is no %q", ErrUnknown, m.Name)
	}
	if where, err = m.snapshot(); err != nil {
		return nil, "", err
	}
	files, missing, err := weightFiles(where)
	if err == nil && missing != "" {
		err = fmt.Errorf("%w: %s", ErrUnknown, missing)
	}
	return files, where, err
}

// hubName matches a name on the hub, such as nvidia/Llama-3.3-70B-Instruct-FP8 or gpt2.
var hubName = regexp.MustCompile(`^[\w.-]+(/[\w.-]+)?$`)

// snapshot returns the folder of the model's revision in the cache of the Hugging Face hub. refs/main holds the
// commit, and snapshots/COMMIT links to the blobs.
func (m Model) snapshot() (string, error) {
	revision := cmp.Or(m.Revision, "main")
	if !hubName.MatchString(m.Name) || !filepath.IsLocal(revision) {
		return "", fmt.Errorf("%w: %q at %q is neither a folder nor a name on the hub", ErrUnknown, m.Name, revision)
	}
	repo := filepath.Join(m.hub(), "models--"+strings.ReplaceAll(m.Name, "/", "--"))
	commit := revision // if the revision is a branch or tag, its commit is read below
	ref, err := foreign.Read(filepath.Join(repo, "refs", revision), 1<<10)
	switch {
	case err == nil:
		commit = strings.TrimSpace(string(ref))
	case !errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("find the model: %w", err)
	}
	dir := filepath.Join(repo, "snapshots", commit)
	if info, err := os.Stat(dir); !filepath.IsLocal(commit) || err != nil || !info.IsDir() {
		return "", fmt.Errorf("%w: there is no %s", ErrUnknown, dir)
	}
	return dir, nil
}

// hub returns the cache folder of the Hugging Face hub (huggingface_hub/constants.py, 0.36.2).
func (m Model) hub() string {
	env := m.Env
	expand := func(dir string) string {
		if rest, ok := strings.CutPrefix(dir, "~"); ok && (rest == "" || rest[0] == '/') {
			dir = env("HOME") + rest
		}
		return os.Expand(dir, env)
	}
	home := expand(cmp.Or(env("HF_HOME"), filepath.Join(cmp.Or(env("XDG_CACHE_HOME"), "~/.cache"), "huggingface")))
	return expand(cmp.Or(m.CacheDir, env("HF_HUB_CACHE"), env("HUGGINGFACE_HUB_CACHE"), filepath.Join(home, "hub")))
}

// weightFiles returns the weights in a folder, and a text that says what the folder lacks. The text is empty if the
// folder lacks nothing.
func weightFiles(dir string) (files []File, missing string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, "", fmt.Errorf("find the weights: %w", err)
	}
	names, index, err := choose(dir, entries)
	if err != nil {
		return nil, "", err
	}
	var absent []string
	for _, name := range names {
		file := filepath.Join(dir, name)
		info, err := os.Stat(file) // Stat follows links
		switch {
		case errors.Is(err, fs.ErrNotExist):
			absent = append(absent, name)
		case err != nil:
			return nil, "", fmt.Errorf("find the weights: %w", err)
		case !info.Mode().IsRegular():
			return nil, "", fmt.Errorf("find the weights: %s is not a file", file)
		default:
			files = append(files, File{file, info.Size()})
		}
	}
	if len(absent) > 0 {
		missing = fmt.Sprintf("%s lacks %s", dir, absent[0])
		if more := len(absent) - 1; more > 0 {
			missing += fmt.Sprintf(" and %d more", more)
		}
		if index != "" {
			missing += ", which " + index + " names"
		}
		return nil, missing, nil
	}
	if len(files) == 0 {
		missing = dir + " holds no weights (*.safetensors, *.bin, *.pt, *.gguf)"
	}
	return files, missing, nil
}

// choose returns the names of the model's files, sorted, and the index that lists them. If there is no index, the name
// of the index is empty.
func choose(dir string, entries []fs.DirEntry) (names []string, index string, err error) {
	has := func(name string) bool {
		return slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() == name })
	}
	for _, k := range kinds {
		if names = matches(k.pattern, entries); len(names) == 0 {
			continue
		}
		if k.index == "" || !has(k.index) {
			return names, "", nil
		}
		names, err = readIndex(filepath.Join(dir, k.index))
		return names, k.index, err
	}
	for _, k := range kinds { // no weights are there, but an index may name some
		if k.index != "" && has(k.index) {
			names, err = readIndex(filepath.Join(dir, k.index))
			return names, k.index, err
		}
	}
	return nil, "", nil
}

// matches returns the names of the weights of one kind.
func matches(pattern string, entries []fs.DirEntry) (names []string) {
	for _, e := range entries {
		ok, _ := path.Match(pattern, e.Name()) // Match cannot fail: our patterns are well-formed
		if ok && !slices.ContainsFunc(notWeights, func(end string) bool { return strings.HasSuffix(e.Name(), end) }) {
			names = append(names, e.Name())
		}
	}
	return names
}

// readIndex returns the files that an index of shards lists.
func readIndex(file string) ([]string, error) {
	text, err := foreign.Read(file, 1<<30)
	if err != nil {
		return nil, fmt.Errorf("find the weights: %w", err)
	}
	var index struct {
		WeightMap map[string]string `json:"weight_map"` // maps the name of each tensor to its file
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return nil, fmt.Errorf("find the weights: %s: %w", file, err)
	}
	shards := make(map[string]bool)
	for tensor, shard := range index.WeightMap {
		if !filepath.IsLocal(shard) {
			return nil, fmt.Errorf("find the weights: %s: tensor %q is in %q, which is not in the model's folder", file, tensor, shard)
		}
		shards[shard] = true
	}
	return slices.Sorted(maps.Keys(shards)), nil
}
