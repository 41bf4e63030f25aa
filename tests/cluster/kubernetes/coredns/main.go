// Command coredns is CoreDNS with the plugins that a cluster's DNS needs.
// It is a program of its own because CoreDNS registers its flags globally,
// where the other programs' command lines would see them.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	// The order is the order in which plugins see a query.
	dnsserver.Directives = []string{"health", "ready", "errors", "cache", "kubernetes", "forward"}
	coremain.Run()
}
