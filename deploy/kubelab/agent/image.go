package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
)

// An Image is what a container's image adds to the files of the machine.
type Image struct {
	Dir        string   `json:"-"` // directory whose files are laid over the machine's; empty means none
	User       int      // who runs the container, unless the pod says so; also the group
	Entrypoint []string // command of a container that has none
}

// ReadImage reads an image from a directory that is laid out as the bundle of a container: the files are in rootfs, and
// the rest is in config.json, which may be missing.
func ReadImage(dir string) (Image, error) {
	image := Image{Dir: filepath.Join(dir, "rootfs")}
	if _, err := os.Stat(image.Dir); err != nil {
		return Image{}, err
	}
	text, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return image, nil
	}
	if err != nil {
		return Image{}, err
	}
	if err := json.Unmarshal(text, &image); err != nil {
		return Image{}, fmt.Errorf("%s: %w", filepath.Join(dir, "config.json"), err)
	}
	return image, nil
}

// tag matches the tag and the digest at the end of an image's name. A port in the name of a registry is no tag.
var tag = regexp.MustCompile(`(:[^/:@]+)?(@sha256:[0-9a-f]+)?$`)

// image returns the image of a container.
func (a *Agent) image(name string) Image {
	if image, ok := a.Images[name]; ok {
		return image
	}
	return a.Images[tag.ReplaceAllString(name, "")]
}
