// SPDX-License-Identifier: AGPL-3.0-or-later
import { defineConfig } from "vitest/config"

export default defineConfig({
  test: {
    include: ["test/**/*.test.ts"],
    globalSetup: ["test/support/setup.ts"],
    // Two workers on two cores: the database and the programs under test need room as well.
    maxWorkers: 2,
    testTimeout: 30_000,
    hookTimeout: 60_000
  }
})
