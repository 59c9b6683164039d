// SPDX-License-Identifier: AGPL-3.0-or-later
/** What a daemon that cannot start says: one clear line, an exit code of sysexits, no stack. */
import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import { spawnSync } from "node:child_process"
import * as fs from "node:fs"
import * as net from "node:net"
import * as path from "node:path"
import { configuration, daemon, directory, program, run } from "../support/Daemon.ts"

const serve = Effect.fnUntraced(function* (
  config: string,
  env: { readonly [name: string]: string } = {}
) {
  const home = yield* directory
  fs.writeFileSync(path.join(home, "pepsi.conf"), config)
  const ended = yield* Effect.promise(() =>
    run(["serve", "-c", path.join(home, "pepsi.conf")], { env: { PEPSI_HOME: home, ...env } })
  )
  return { ...ended, home }
})

/** One line for each fault, and nothing a person cannot read. */
const isClear = (stderr: string, lines = 1): void => {
  assert.lengthOf(
    stderr
      .trim()
      .split("\n")
      .filter((line) => !line.startsWith("timestamp=")),
    lines,
    stderr
  )
  assert.notMatch(stderr, /\n\s+at |Error:|undefined/)
}

describe("a daemon that cannot start", () => {
  it.live("a wrong key: 78, file and line, and the key that was meant", () =>
    Effect.gen(function* () {
      const { code, home, stderr } = yield* serve(configuration({ pepsi: "HOSTNAM = x.example" }))
      assert.strictEqual(code, 78)
      isClear(stderr)
      assert.include(
        stderr,
        `${home}/pepsi.conf:7: [pepsi] HOSTNAM is no option here; did you mean HOSTNAME?`
      )
    })
  )

  it.live("a value that is none: 78, with an example of one that is", () =>
    Effect.gen(function* () {
      const { code, stderr } = yield* serve(
        configuration().replace("POLL_INTERVAL = 500 ms", "POLL_INTERVAL = 5 parsecs")
      )
      assert.strictEqual(code, 78)
      isClear(stderr)
      assert.match(
        stderr,
        /pepsi\.conf:\d+: \[pepsi-dispatch\] POLL_INTERVAL: '5 parsecs' is not a duration.*example/
      )
    })
  )

  it.live("a target that is none: 78, and where it was written", () =>
    Effect.gen(function* () {
      const { code, stderr } = yield* serve(configuration().replace("NEXT = route", "NEXT = rout"))
      assert.strictEqual(code, 78)
      assert.match(stderr, /pepsi\.conf:\d+: \[stage-init\] NEXT: .*rout.*route/)
    })
  )

  it.live(
    "a port in use: 69, address and port",
    () =>
      Effect.gen(function* () {
        const server = net.createServer()
        yield* Effect.acquireRelease(
          Effect.promise(
            () => new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve))
          ),
          () => Effect.sync(() => server.close())
        )
        const { port } = server.address() as net.AddressInfo
        const { code, stderr } = yield* serve(configuration().replace("PORT = 0", `PORT = ${port}`))
        assert.strictEqual(code, 69)
        isClear(stderr)
        assert.include(stderr, `127.0.0.1 port ${port}`)
      }),
    60_000
  )

  for (const place of ["/etc/passwd/pepsi", "/proc/nowhere/pepsi"]) {
    it.live(`a state directory that cannot be made, ${place}: 73, and what to set`, () =>
      Effect.gen(function* () {
        const { code, stderr } = yield* serve(configuration({ pepsi: `STATE_DIR = ${place}` }))
        assert.strictEqual(code, 73)
        isClear(stderr)
        assert.include(stderr, place)
        assert.include(stderr, "STATE_DIR")
      })
    )
  }

  it.live("a database that is not there: 69", () =>
    Effect.gen(function* () {
      const config = configuration({
        more: "[pepsi-postgres]\nCONFIG = postgres://nobody@127.0.0.1:1/pepsi\n"
      })
      const { code, stderr } = yield* serve(config)
      assert.strictEqual(code, 69)
      isClear(stderr)
    })
  )

  it.live(
    "a second daemon in a directory: 69, and who holds it",
    () =>
      Effect.gen(function* () {
        const first = yield* daemon()
        const second = yield* Effect.promise(() =>
          run(["serve", "-c", path.join(first.home, "pepsi.conf")], {
            env: { PEPSI_HOME: first.home }
          })
        )
        assert.strictEqual(second.code, 69)
        isClear(second.stderr)
        assert.include(second.stderr, `pid ${first.pid}`)
      }),
    60_000
  )

  it.live("an older Node: 78, and where the right one comes from", () =>
    Effect.sync(() => {
      const old = ["/usr/bin/node", "/usr/local/bin/node"].find(
        (file) =>
          fs.existsSync(file) &&
          Number(spawnSync(file, ["-p", "process.versions.node"]).stdout.toString().split(".")[0]) <
            24
      )
      if (old === undefined) return // this machine has none
      const { status, stderr } = spawnSync(old, [program, "serve"], { encoding: "utf8" })
      assert.strictEqual(status, 78)
      isClear(stderr)
      assert.include(stderr, "npm ci")
    })
  )

  it.live("a word that is no command: 64 and the help", () =>
    Effect.gen(function* () {
      const { code, stderr } = yield* Effect.promise(() => run(["serv"]))
      assert.strictEqual(code, 64)
      assert.include(stderr, "serv")
    })
  )
})
